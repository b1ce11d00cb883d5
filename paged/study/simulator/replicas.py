"""Replicas, each with its own scheduler and pool, and a router that sends each request to one of them.

Replicas of a dense model step independently. Data-parallel ranks of a model with experts share the experts, so they step together: a step ends with
the slowest rank, and a rank without requests computes a dummy token. vLLM does the same.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from paged import Scheduler
from paged.engine.pace import Pace
from paged.engine.replica_index import ReplicaIndex, prompt_keys
from paged.engine.replica_load import load_of
from paged.engine.routing import Prompt, Reservation
from paged.study.hardware import CostModel, StepWork
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.hardware.roofline import Roofline
from paged.study.simulator.arrivals import Arrivals
from paged.study.simulator.latencies import Latencies
from paged.study.simulator.result import SimulationResult, merged
from paged.study.simulator.routers import ROUTERS, Balancer, Exact, Routing
from paged.study.simulator.simulation import Simulation, Step
from paged.study.traces import Trace

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

    def report(self, tell: Callable[[Exact, float], None], at: float) -> None:
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
