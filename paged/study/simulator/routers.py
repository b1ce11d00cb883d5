"""Routers for simulations to compare: each chooses the replica of the next request.

Beside ours are those of other systems, by their documentation and its defaults, but with prefixes of blocks instead of
characters. All but `exact` see the replicas' state without delay, which favours them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from paged.base.fields import AtLeast1
from paged.engine.replica_index import Keys, ReplicaIndex
from paged.engine.replica_load import REPORT_S
from paged.engine.routing import Prompt, Reservation, Router, RoutingRules
from paged.errors import InvalidConfig
from paged.study.limits import NotNegative, check


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


class Fleet(Protocol):
    """The simulated replicas as a router sees them, by their places.

    ongoing             requests of each replica now, from all ingresses
    has_restart_points  layers are of several kinds
    """

    routing: Routing
    ongoing: list[int]
    block_size: int
    has_restart_points: bool

    def prompt_of(self, request: int) -> Prompt:
        """Return a request as `exact` takes it; its keys are made once."""

    def counts(self, replica: int) -> tuple[int, int]:
        """Return the requests that wait and that run now."""

    def tell(self, made: Reservation) -> None:
        """Pass an ingress's reservation to its replica, and to the other ingresses."""


class Balancer:
    """Chooses replicas for the requests of one ingress. Routers of a kind share what the `first` of them made."""

    def __init__(self, fleet: Fleet, number: int, seed: int, first: Balancer | None) -> None:
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

    def __init__(self, fleet: Fleet, number: int, seed: int, first: Balancer | None) -> None:
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

    def __init__(self, fleet: Fleet, number: int, seed: int, first: Balancer | None) -> None:
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

    def __init__(self, fleet: Fleet, number: int, seed: int, first: Balancer | None) -> None:
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

    def __init__(self, fleet: Fleet, number: int, seed: int, first: Balancer | None) -> None:
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
