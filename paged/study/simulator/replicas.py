"""Replicas, each with its own scheduler and pool, and routers to compare, which send each request to one of them.

Beside ours the routers are those of other systems, by their documentation and its defaults, but with prefixes of blocks instead of characters. All but
`exact` see the replicas' state without delay, which favours them.

Replicas of a dense model step independently. Data-parallel ranks of a model with experts share the experts, so they step together: a step ends with
the slowest rank, and a rank without requests computes a dummy token. vLLM does the same.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import Scheduler
from paged.base.fields import AtLeast1
from paged.engine.pace import Pace
from paged.engine.replica_index import Keys, ReplicaIndex, prompt_keys
from paged.engine.replica_load import REPORT_S, load_of
from paged.engine.routing import Prompt, Reservation, Router, RoutingRules
from paged.errors import InvalidConfig
from paged.study.hardware import CostModel, StepWork
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.hardware.roofline import Roofline
from paged.study.limits import NotNegative, check
from paged.study.simulator.arrivals import Arrivals
from paged.study.simulator.result import Latencies, SimulationResult, merged
from paged.study.simulator.simulation import Simulation, Step
from paged.study.traces import Trace


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of a scenario, and the routers in front of them.

    router     a name in `ROUTERS`
    ingresses  routers of that kind, to which requests come in turn
    delay_s    of events, reports and messages between ingresses
    report_s   between reports of a replica
    tells      ingresses send one another their reservations
    rules      of `exact`
    """

    replicas: AtLeast1 = 1
    router: str = "exact"
    ingresses: AtLeast1 = 1
    delay_s: NotNegative = 0.02
    report_s: NotNegative = REPORT_S
    tells: bool = True
    rules: RoutingRules = RoutingRules()

    def check(self) -> None:
        """Raise InvalidConfig for a number out of range or an unknown router."""
        check(self)
        if self.router not in ROUTERS:
            raise InvalidConfig(f"router is {self.router!r}; known are {', '.join(ROUTERS)}")
        self.rules.check()


_OF_NO_REQUEST = StepWork(
    computed_tokens=1.0, context_tokens=1.0, attended_pairs=1.0, decode_rows=1.0, decode_context=1.0, rows=1.0
)


class Replicas:
    """A simulation of a trace on several schedulers, one for each replica.

    ranks       the replicas' simulations, which share arrivals and latencies
    replica_of  the replica of each request, int64 [requests]; −1: it has not come
    ongoing     requests of each replica now
    """

    def __init__(
        self,
        trace: Trace,
        schedulers: Sequence[Scheduler],
        cost_model: CostModel,
        routing: Routing,
        *,
        clients: int | None = None,
        runs_ahead: bool = False,
        check: bool = False,
        price_per_hour: float | None = None,
    ) -> None:
        """Options are as in `Simulation`. Raises InvalidConfig."""
        routing.check()
        self.trace, self.routing = trace, routing
        self.latencies = Latencies(len(trace))
        self.block_size = schedulers[0].manager.block_size
        self.has_restart_points = not schedulers[0].manager.layout.is_plain
        self._arrivals = Arrivals(trace, clients)
        self.ranks = [
            Simulation(
                trace,
                scheduler,
                cost_model,
                check=check,
                price_per_hour=price_per_hour,
                runs_ahead=runs_ahead,
                shared=self._arrivals,
                latencies=self.latencies,
            )
            for scheduler in schedulers
        ]
        for rank in self.ranks:
            rank.deliver = self._deliver
        self.replica_of: NDArray[np.int64] = np.full(len(trace), -1, np.int64)
        self.ongoing = [0] * len(schedulers)
        self._balancers: list[Balancer] = []
        for number in range(routing.ingresses):
            first = self._balancers[0] if number else None
            self._balancers.append(ROUTERS[routing.router](self, number, trace.seed, first))
        self._wires = [_Wire(self, place) for place in range(len(schedulers))] if routing.router == "exact" else []
        # Messages on their way: when each comes, its number in order of sending, and its action.
        self._coming: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._prompts: dict[int, Prompt] = {}
        self._now_s = 0.0
        self._step = cost_model if isinstance(cost_model, MeasuredStep | Roofline) else None

    def steps(self) -> Iterator[Step]:
        """Run to the end, and yield each step of a replica. Raises SimulationStuck."""
        is_lockstep = self._step is not None and self._step.is_lockstep
        while self._arrivals.are_left or any(rank.scheduler.has_unfinished for rank in self.ranks):
            busy = [place for place, rank in enumerate(self.ranks) if rank.scheduler.has_unfinished]
            if not busy:
                # No request is here: skip to when the next one comes.
                now_s = self._arrivals.next_s()
                for rank in self.ranks:
                    rank.now_s = max(rank.now_s, now_s)
                self._deliver(max(rank.now_s for rank in self.ranks))
            elif is_lockstep:
                self._deliver(min(self.ranks[place].seen_s for place in busy))
                yield from self._together()
            else:
                # The replica that is furthest behind runs next, so that a request is routed by the state at about its arrival.
                place = min(busy, key=lambda place: self.ranks[place].now_s)
                rank = self.ranks[place]
                self._deliver(rank.seen_s)
                # Others may be behind it after a skip: requests that come meanwhile are routed when all have got there.
                step = None if rank.skip_ahead() else rank.run_step()
                if step is not None:
                    self._stepped(place, step)
                    yield step
        self._hear(np.inf)

    def run(self) -> SimulationResult:
        """Run to the end. Return the figures. Raises SimulationStuck."""
        for _ in self.steps():
            pass
        return self.result()

    def _together(self) -> Iterator[Step]:
        """Run a step of all ranks."""
        assert self._step is not None, "ranks that step together are timed by a model on a device"
        batches = [rank.scheduler.schedule(rank.now_s) for rank in self.ranks]
        works = [_OF_NO_REQUEST if batch.is_empty else rank.work_of(batch) for rank, batch in zip(self.ranks, batches)]
        if all(batch.is_empty for batch in batches):
            for rank, batch in zip(self.ranks, batches):
                rank.nothing_ran(batch)
            return
        seconds = self._step.together(works)
        ends_s = max(rank.now_s for rank in self.ranks) + seconds
        for place, (rank, batch, work) in enumerate(zip(self.ranks, batches, works)):
            if batch.is_empty:
                rank.scheduler.update(batch, np.empty(0, np.int32), now=ends_s)
                rank.now_s = ends_s
            else:
                step = rank.finish(batch, work, ends_s - rank.now_s)
                self._stepped(place, step)
                yield step

    def _deliver(self, seen_s: float) -> None:
        """Add the requests that have come until then, each to the replica that its ingress's router chooses."""
        while (arrival := self._arrivals.next_s()) <= seen_s:
            number = self._arrivals.take()
            self._hear(arrival)
            self.replica_of[number] = chosen = self._balancers[number % len(self._balancers)].choose(number, arrival)
            rank = self.ranks[chosen]
            if not rank.scheduler.has_unfinished:
                rank.now_s = max(rank.now_s, arrival)
            self.ongoing[chosen] += 1
            if not rank.add(number, arrival):
                self._end(number, arrival)
            self._prompts.pop(number, None)

    def _stepped(self, place: int, step: Step) -> None:
        """Send the messages of a step."""
        for number in step.ended:
            self.send(step.now_s, lambda now, number=number: self._end(number, now))  # type: ignore[misc]
        if self._wires:
            self._wires[place].stepped(step)

    def _end(self, number: int, now: float) -> None:
        self.ongoing[self.replica_of[number]] -= 1
        self._balancers[number % len(self._balancers)].ended(number, now)

    def send(self, at: float, message: Callable[[float], None]) -> None:
        """Send a message that is called at a time, with that time."""
        heappush(self._coming, (at, next(self._order), message))

    def _hear(self, now: float) -> None:
        self._now_s = now
        while self._coming and self._coming[0][0] <= now:
            at, _, message = heappop(self._coming)
            message(at)

    def prompt_of(self, request: int) -> Prompt:
        """Return a request as a router takes it."""
        if request not in self._prompts:
            tokens, tenant = self.trace.prompt(request), str(self.trace.tenant[request])
            keys = prompt_keys(tokens, self.block_size, (tenant, None, None) if tenant else None)
            self._prompts[request] = Prompt(str(request), keys, len(tokens), tenant)
        return self._prompts[request]

    def counts(self, replica: int) -> tuple[int, int]:
        """Return the requests that wait and that run now."""
        counts = self.ranks[replica].scheduler.counts()
        return counts["waiting"], counts["running"]

    def tell(self, made: Reservation) -> None:
        """Pass a reservation to its replica, and to the other ingresses."""
        self._wires[int(made.replica)].received[made.router] = made.number
        if self.routing.tells:
            for place, each in enumerate(self._balancers):
                if str(place) != made.router and isinstance(each, Exact):
                    self.send(self._now_s + self.routing.delay_s, lambda now, to=each.router: to.heard(made, now))  # type: ignore[misc]

    def index(self) -> ReplicaIndex:
        """Return the index of content, which all ingresses share."""
        first = self._balancers[0]
        assert isinstance(first, Exact), "others know of no events"
        return first.router.index

    def report(self, tell: "Callable[[Exact, float], None]", at: float) -> None:
        """Call `tell` for each ingress after the delay."""
        for each in self._balancers:
            if isinstance(each, Exact):
                self.send(at + self.routing.delay_s, lambda now, to=each: tell(to, now))  # type: ignore[misc]

    def result(self) -> SimulationResult:
        """Return the figures of all replicas so far; `num_blocks` is that of each."""
        return merged([rank.result() for rank in self.ranks], self.routing.router, self.trace.num_left_out)


class _Wire:
    """Sends a replica's events after each step, and its load reports.

    received  the latest number of a reservation from each ingress
    """

    def __init__(self, fleet: Replicas, place: int) -> None:
        self._fleet, self._rank, self._name = fleet, fleet.ranks[place], str(place)
        self._pace = Pace()
        self._reported_s = -np.inf
        self.received: dict[str, int] = {}
        self._rank.scheduler.manager.take_events(restart_points=fleet.has_restart_points)

    def stepped(self, step: Step) -> None:
        """Send what a step changed."""
        fleet, manager, name = self._fleet, self._rank.scheduler.manager, self._name
        self._pace.rest()
        own = step.seconds / (step.skipped + 1)
        self._pace.note(step.batch.num_scheduled_tokens, step.now_s - own, step.now_s)
        events = manager.take_events(restart_points=fleet.has_restart_points)
        if events:
            index = fleet.index()
            fleet.send(step.now_s + fleet.routing.delay_s, lambda now: index.apply(name, events))
        is_idle = not self._rank.scheduler.has_unfinished
        if is_idle or step.now_s - self._reported_s >= fleet.routing.report_s:
            self._reported_s = step.now_s
            load = load_of(self._rank.scheduler.outlook(), self._pace, received=dict(self.received))
            fleet.report(lambda to, now: to.router.report(name, load, now), step.now_s)


class Balancer:
    """Chooses replicas for the requests of one ingress. Routers of a kind share what the `first` of them made."""

    def __init__(self, fleet: Replicas, number: int, seed: int, first: "Balancer | None") -> None:
        self.fleet = fleet
        self.random = Random(seed * 1_000_003 + number)

    def choose(self, request: int, now: float) -> int:
        """Return the place of a replica. Raises NotImplementedError in this class."""
        raise NotImplementedError

    def ended(self, request: int, now: float) -> None:
        """Note that a request of this ingress has ended."""


class Chance(Balancer):
    """A random replica."""

    def choose(self, request: int, now: float) -> int:
        return self.random.randrange(len(self.fleet.ongoing))


class RoundRobin(Balancer):
    """One replica after another, from a random one on."""

    def __init__(self, fleet: Replicas, number: int, seed: int, first: Balancer | None) -> None:
        super().__init__(fleet, number, seed, first)
        self._next = self.random.randrange(len(fleet.ongoing))

    def choose(self, request: int, now: float) -> int:
        self._next = (self._next + 1) % len(self.fleet.ongoing)
        return self._next


class LeastLoaded(Balancer):
    """The replica with the fewest sequences, where a waiting one counts as four running ones, as in vLLM's data-parallel balancer."""

    def choose(self, request: int, now: float) -> int:
        loads = [4 * waiting + running for waiting, running in map(self.fleet.counts, range(len(self.fleet.ongoing)))]
        return loads.index(min(loads))


class PowerOfTwo(Balancer):
    """Of two random replicas the one with fewer requests, as in Ray Serve."""

    def choose(self, request: int, now: float) -> int:
        return self.of_two(range(len(self.fleet.ongoing)))

    def of_two(self, places: Sequence[int]) -> int:
        """Return the better of two random places of these, or the only one."""
        two = self.random.sample(places, min(2, len(places)))
        return min(two, key=self.fleet.ongoing.__getitem__)


class Sent:
    """The blocks of prompts that were sent to each replica; forgets nothing."""

    def __init__(self, num: int) -> None:
        self._index = ReplicaIndex()
        self._num = [0] * num
        for place in range(num):
            self._index.add(str(place))

    def longest(self, keys: Keys) -> tuple[int, list[int]]:
        """Return the most leading blocks of a prompt that a replica was sent, and the places of such replicas."""
        depths = {int(name): depth for name, depth in self._index.depths(keys).items()}
        most = max(depths.values(), default=0)
        return most, sorted(place for place, depth in depths.items() if depth == most)

    def smallest(self) -> list[int]:
        """Return the places to which the fewest blocks were sent."""
        least = min(self._num)
        return [place for place, num in enumerate(self._num) if num == least]

    def note(self, place: int, keys: Keys) -> None:
        """Note that a prompt was sent to a place."""
        new = keys[self._index.depths(keys).get(str(place), 0) :]
        self._index.store(str(place), new)
        self._num[place] += len(new)


class PrefixTrie(PowerOfTwo):
    """Ray Serve's PrefixCacheAffinityRouter. While loads differ by 10 requests at most: the replica that was sent most of the prompt before, if at
    least a tenth of it, else one that was sent least. Else: power of two. All ingresses share the trie, which forgets nothing."""

    _MOST_APART, _LEAST_MATCH = 10, 0.1

    def __init__(self, fleet: Replicas, number: int, seed: int, first: Balancer | None) -> None:
        super().__init__(fleet, number, seed, first)
        self.sent: Sent = first.sent if isinstance(first, PrefixTrie) else Sent(len(fleet.ongoing))

    def choose(self, request: int, now: float) -> int:
        fleet, keys = self.fleet, self.fleet.prompt_of(request).keys
        chosen: list[int] = list(range(len(fleet.ongoing)))
        if max(fleet.ongoing) - min(fleet.ongoing) <= self._MOST_APART:
            longest, best = self.sent.longest(keys)
            chosen = best if longest >= self._LEAST_MATCH * max(1, len(keys)) and longest else self.sent.smallest()
        place = self.of_two(chosen)
        self.sent.note(place, keys)
        return place


class ApproximatePrefix(Balancer):
    """SGLang's cache-aware router. If loads differ by more than 32 requests: the shortest queue. Else: the replica that was sent most of the prompt
    before, if more than half of it, else the one that was sent least. Each ingress knows only its own requests."""

    _MOST_APART, _MOST_TIMES, _LEAST_MATCH = 32, 1.0001, 0.5

    def __init__(self, fleet: Replicas, number: int, seed: int, first: Balancer | None) -> None:
        super().__init__(fleet, number, seed, first)
        self._sent = Sent(len(fleet.ongoing))
        self._ongoing = [0] * len(fleet.ongoing)
        self._place_of: dict[int, int] = {}

    def choose(self, request: int, now: float) -> int:
        keys, ongoing = self.fleet.prompt_of(request).keys, self._ongoing
        least, most = min(ongoing), max(ongoing)
        longest, best = self._sent.longest(keys)
        if most - least > self._MOST_APART and most > least * self._MOST_TIMES:
            place = ongoing.index(least)
        elif longest > self._LEAST_MATCH * len(keys):
            place = best[0]
        else:
            place = self._sent.smallest()[0]
        self._sent.note(place, keys)
        self._place_of[request] = place
        ongoing[place] += 1
        return place

    def ended(self, request: int, now: float) -> None:
        self._ongoing[self._place_of.pop(request)] -= 1


class Exact(Balancer):
    """Our router (`paged.engine.routing`), by events and reports."""

    def __init__(self, fleet: Replicas, number: int, seed: int, first: Balancer | None) -> None:
        super().__init__(fleet, number, seed, first)
        index = first.router.index if isinstance(first, Exact) else None
        rules = fleet.routing.rules
        if not fleet.routing.tells:
            rules = msgspec.structs.replace(rules, num_untold=fleet.routing.ingresses - 1)
        self.router: Router = Router(fleet.block_size, rules, name=str(number), draw=self.random.random, index=index)
        for place in range(len(fleet.ongoing)):
            self.router.add(str(place), restart_points=fleet.has_restart_points)

    def choose(self, request: int, now: float) -> int:
        prompt = self.fleet.prompt_of(request)
        choice = self.router.choose(prompt, now)
        best = choice.replicas[0]
        self.fleet.tell(self.router.routed(prompt, best, now, choice.depth))
        return int(best)

    def ended(self, request: int, now: float) -> None:
        self.router.completed(str(request), now)


ROUTERS: dict[str, type[Balancer]] = {
    "random": Chance,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "prefix-trie": PrefixTrie,
    "approximate-prefix": ApproximatePrefix,
    "exact": Exact,
}
