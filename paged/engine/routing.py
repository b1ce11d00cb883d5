"""The choice of a replica for a request: by the cached part of its prompt, and by the wait at each replica.

    expected first token = wait + tokens that are not cached there · seconds a token        by replica

                cached   wait   compute   expected
    replica 0   90 %     0.8 s    0.1 s     0.9 s        few tokens to compute, behind others
    replica 1    0 %     0.0 s    1.0 s     1.0 s        least loaded: 0 is chosen, and 1 once more wait at 0

A replica's report is old, so requests that this router has sent since then count as reserved. Other routers tell theirs
(`heard`), or are taken to send as many. There is no clock and no network: times and random numbers are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from paged.base.arguments import is_real
from paged.base.words import shown
from paged.engine.replica_index import Keys, ReplicaIndex
from paged.errors import InvalidConfig, UnknownReplica

_Scored = tuple[float, float, float, str, bool]
"""A replica: its score; the expected first token, and what of it is computed, in seconds; its name; whether it is full."""
_UNKNOWN_TOKEN_S = 1e-4
"""Seconds a token, until a replica has reported its own."""
_FADING_AT_ONCE = 2
_SPARSE = (*(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48), *range(64, 1 << 20, 64))
"""Lengths of prompts, in blocks, at which sent content is noted until it is cached."""
_SPARSE_PLACES = np.array(_SPARSE) - 1


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A request that needs a replica.

    id          its name until it is completed
    keys        of its full blocks (`prompt_keys`), uint64 [blocks]
    num_tokens  of its prompt
    tenant      "" without one
    """

    id: str
    keys: Keys
    num_tokens: int
    tenant: str = ""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a replica.

    begin_s      seconds until a request that came now would begin (`forecast`)
    token_s      seconds that a prompt token takes; 0: not known yet
    num_running  sequences that run
    queued       tokens that waiting requests have to compute, without cached ones, by tenant
    is_fair      tenants take turns: a request waits for as much of another tenant's as its own tenant has
    is_full      it refuses requests now
    received     by router, the number of the latest request that the report counts; None: it does not say
    cache_tokens tokens that its memory holds; 0: it does not say
    """

    begin_s: float = 0.0
    token_s: float = 0.0
    num_running: int = 0
    queued: Mapping[str, int] = msgspec.field(default_factory=dict)
    is_fair: bool = False
    is_full: bool = False
    received: Mapping[str, int] | None = None
    cache_tokens: int = 0


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """A request sent to a replica, for other routers to count (`Router.heard`).

    number  counts the requests of a router, from 1 on
    tokens  that the replica is expected to compute
    """

    router: str
    number: int
    replica: str
    id: str
    tenant: str
    tokens: int


class RoutingRules(msgspec.Struct, frozen=True, kw_only=True):
    """The weights and limits of a router.

    bound_s, bound_times
                  the latest expected first token: bound_times · the median's (of two replicas the better's) + bound_s
    spared        weight of a second of computing that is spared, beside a second of waiting: it helps later requests,
                  too
    crowded       more of that weight, per share of memory that was computed lately: computing there evicts
    lately_s      seconds after which what was computed counts for 1 / e as much
    running_s     seconds that a running sequence counts for
    settle_s      seconds after which a replica has received what was sent, and its events are known
    lapse_s       seconds after which a sent request is taken to have begun, whatever is reported, and then to have
                  ended
    num_untold    other routers that send to these replicas and do not tell this one
    """

    bound_s: float = 0.5
    bound_times: float = 3.0
    spared: float = 1.0
    crowded: float = 3.0
    lately_s: float = 300.0
    running_s: float = 0.001
    settle_s: float = 0.25
    lapse_s: float = 30.0
    num_untold: int = 0

    def check(self) -> None:
        """Raise InvalidConfig for a value that is negative or no finite number."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (is_real(value) and 0 <= value < math.inf):
                raise InvalidConfig(f"{name} is {shown(value)}; it has to be a finite number, 0 or more.")


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The candidates for a request, the best first, and what is expected at the first.

    expected_s  seconds until the first token
    depth       blocks of the prompt that the replica has
    """

    replicas: list[str]
    expected_s: float
    depth: int


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """A reservation that counts, its time, and the noted keys of its prompt."""

    made: Reservation
    since: float
    keys: Sequence[int] = ()


class _Replica:
    """A router's record of a replica: its report, the requests sent since, and the share of memory computed lately."""

    def __init__(self, rules: RoutingRules) -> None:
        self._rules, self._times = rules, 1 + rules.num_untold
        self.filled = 0.0
        self.load = ReplicaLoad()
        self.seen = 0.0
        self.reserved = 0
        self._sent: dict[tuple[str, int], _Sent] = {}
        # How many requests have each noted key.
        self.num_noted: Counter[int] = Counter()

    def wait_s(self, begin_s: float, tenant: str, tokens: int, token_s: float) -> float:
        """Return the seconds until a tenant's request of so many tokens begins; `begin_s`: if nothing was sent
        before."""
        load, times, wait = self.load, self._times, begin_s
        if self.reserved:
            wait += self.reserved * times * token_s
        if not load.is_fair or not wait:
            return wait
        queued = dict(load.queued)
        for sent in self._sent.values():
            queued[sent.made.tenant] = queued.get(sent.made.tenant, 0) + sent.made.tokens * times
        total = sum(queued.values())
        if not total:
            return wait
        mine = queued.pop(tenant, 0)
        return wait * (mine + sum([min(other, mine + tokens) for other in queued.values()])) / total

    def reserve(self, made: Reservation, now: float) -> None:
        """Count a reservation until a report has it."""
        if (made.router, made.number) not in self._sent:
            self._sent[made.router, made.number] = _Sent(made, now)
            self.reserved += made.tokens
            if self.load.cache_tokens:
                self.filled += self._times * made.tokens / self.load.cache_tokens

    def settle(self, router: str, number: int) -> None:
        """Stop counting a reservation."""
        sent = self._sent.pop((router, number), None)
        if sent is not None:
            self.reserved -= sent.made.tokens

    def take_back(self, made: Reservation) -> None:
        """Stop counting a reservation, and its tokens as computed: the request went elsewhere."""
        self.settle(made.router, made.number)
        if self.load.cache_tokens:
            self.filled = max(0.0, self.filled - self._times * made.tokens / self.load.cache_tokens)

    def erase(self, keys: Iterable[int]) -> list[int]:
        """Take back the notes of a request, and return the keys that no other request has."""
        num_noted, gone = self.num_noted, []
        for key in keys:
            if (num := num_noted[key]) > 1:
                num_noted[key] = num - 1
            else:
                num_noted.pop(key)  # twice as fast as del of a Counter
                gone.append(key)
        return gone

    def reported(self, load: ReplicaLoad, now: float) -> None:
        """Take a report, and settle the reservations that it counts."""
        lately_s, settle_s = self._rules.lately_s, self._rules.settle_s
        self.filled *= math.exp((self.seen - now) / lately_s) if lately_s else 0.0
        self.load, self.seen = load, now
        received = load.received
        for (router, number), sent in list(self._sent.items()):
            is_in = sent.since <= now - settle_s if received is None else number <= received.get(router, 0)
            if is_in:
                self.settle(router, number)

    def lapse(self, before: float) -> None:
        """Settle the reservations made before a time."""
        for key, sent in list(self._sent.items()):
            if sent.since > before:
                break
            self.settle(*key)


class Router:
    """One of the routers of a set of replicas, which have names. `draw` gives numbers from 0 to below 1.

    index  what each replica has, shared with other routers or its own; its owner tells it of events (`apply` and
           others)

    Times are seconds of one clock, which never goes back.
    """

    def __init__(
        self,
        block_size: int,
        rules: RoutingRules | None = None,
        *,
        name: str = "",
        draw: Callable[[], float],
        index: ReplicaIndex | None = None,
    ) -> None:
        self.rules = rules or RoutingRules()
        self.rules.check()
        self.name = name
        self.block_size = block_size
        self.index = ReplicaIndex() if index is None else index
        self._draw = draw
        self._replicas: dict[str, _Replica] = {}
        # Requests that are not completed, the oldest first.
        self._by_id: dict[str, _Sent] = {}
        self._num_sent = 0
        # When each reservation was made, and where, in order.
        self._reserved: deque[tuple[float, str]] = deque()
        # Content that was sent and is not cached yet, and when each note of it goes, in order.
        self._expected = ReplicaIndex()
        self._fading: deque[tuple[float, str, Sequence[int]]] = deque()

    @property
    def replicas(self) -> list[str]:
        """The replicas that requests can be sent to."""
        return list(self._replicas)

    def add(self, replica: str, *, restart_points: bool = False) -> None:
        """Add an empty, idle replica; `restart_points` as of `ReplicaIndex.add`. Raises InvalidConfig for a known
        one."""
        self._expected.add(replica)
        if replica not in self.index:
            self.index.add(replica, restart_points=restart_points)
        self._replicas[replica] = _Replica(self.rules)

    def remove(self, replica: str) -> None:
        """Forget a replica, and the requests that it has. Raises UnknownReplica."""
        self._expected.remove(replica)
        if replica in self.index:
            self.index.remove(replica)
        del self._replicas[replica]
        self._by_id = {id: known for id, known in self._by_id.items() if known.made.replica != replica}

    def report(self, replica: str, load: ReplicaLoad, now: float) -> None:
        """Take a replica's report. Raises UnknownReplica."""
        self._replica(replica).reported(load, now)

    def choose(self, prompt: Prompt, now: float, candidates: Sequence[str] | None = None) -> Choice:
        """Rank replicas for a request, `candidates` or all; full ones come last. Nothing is reserved (`routed` does).

        The first one's expected first token is at most `bound_times` · the median replica's + `bound_s`, and later only
        by what other routers may have sent meanwhile. Raises UnknownReplica, and InvalidConfig if there is no replica.
        """
        replicas = self._replicas if candidates is None else {name: self._replica(name) for name in candidates}
        if not replicas:
            raise InvalidConfig(f"request {prompt.id!r} has no replica to go to.")
        self._lapse(now)
        depths, some = self.index.depths(prompt.keys), sparse(prompt.keys)
        noted = self._expected.deepest(some)
        if noted and self._fade(now):
            noted = self._expected.deepest(some)
        reached = depths | {name: max(depths.get(name, 0), _SPARSE[num - 1]) for name, num in noted.items()}
        spared, crowded, running_s = self.rules.spared, self.rules.crowded, self.rules.running_s
        num_tokens, block_size, usual = prompt.num_tokens, self.block_size, 0.0
        scored: list[_Scored] = []
        for name, known in replicas.items():
            load = known.load
            token_s = load.token_s or usual or (usual := self._usual_token_s())
            tokens = num_tokens - reached.get(name, 0) * block_size
            wait = load.begin_s - (now - known.seen)
            if wait < 0.0:
                wait = 0.0
            if known.reserved or load.is_fair:
                wait = known.wait_s(wait, prompt.tenant, tokens, token_s)
            compute = tokens * token_s
            expected = wait + compute
            score = expected + (spared + crowded * known.filled) * compute + running_s * load.num_running
            scored.append((score, expected, compute, name, load.is_full))
        ranked = self._ranked(scored)
        _, expected, _, best, _ = ranked[0]
        return Choice([each[3] for each in ranked], expected, depths.get(best, 0))

    def routed(self, prompt: Prompt, replica: str, now: float, depth: int = 0) -> Reservation:
        """Note that a request was sent to a replica, which had its first `depth` blocks. If it was sent before, that is
        undone, and it keeps its number. Return what other routers may hear. Raises UnknownReplica."""
        known, keys = self._replica(replica), sparse(prompt.keys)[bisect_right(_SPARSE, depth) :].tolist()
        self._fade(now)
        number = self.withdraw(prompt.id, now)
        if number is None:
            number = self._num_sent = self._num_sent + 1
        tokens = max(1, prompt.num_tokens - depth * self.block_size)
        made = Reservation(self.name, number, replica, prompt.id, prompt.tenant, tokens)
        self._reserve(made, now)
        self._expected.store(replica, keys)
        known.num_noted.update(keys)
        self._by_id[prompt.id] = _Sent(made, now, keys)
        return made

    def replica_of(self, id: str) -> str | None:
        """Return the replica of a request that is not completed; None for others."""
        known = self._by_id.get(id)
        return None if known is None else known.made.replica

    def heard(self, made: Reservation, now: float) -> None:
        """Count, once, a request that another router has sent; ignore it if the replica is unknown."""
        if made.replica in self._replicas and made.router != self.name:
            self._reserve(made, now)

    def completed(self, id: str, now: float) -> None:
        """Note that a sent request has ended; ignore an unknown one."""
        known = self._by_id.pop(id, None)
        if known is not None:
            self._replicas[known.made.replica].settle(self.name, known.made.number)
            self._fading.append((now + self.rules.settle_s, known.made.replica, known.keys))

    def withdraw(self, id: str, now: float) -> int | None:
        """Note that an uncompleted request did not go where `routed` said. Return its number; None if it is unknown."""
        known = self._by_id.get(id)
        if known is None:
            return None
        self._replicas[known.made.replica].take_back(known.made)
        self.completed(id, now)
        return known.made.number

    def _reserve(self, made: Reservation, now: float) -> None:
        self._replicas[made.replica].reserve(made, now)
        self._reserved.append((now, made.replica))

    def _ranked(self, scored: list[_Scored]) -> list[_Scored]:
        """Order replicas: first those within the bound, then those that are expected too late, then full ones."""
        rules = self.rules
        # Not the earliest: among many replicas one is always early, and sessions would often leave their content.
        expected = sorted([each[1] for each in scored if not each[4]]) or [math.inf]
        within = expected[(len(expected) - 1) // 2] * rules.bound_times + rules.bound_s

        def rank(each: _Scored) -> int:
            return 2 * each[4] + (each[1] > within)

        ranked = sorted(scored)
        ranked.sort(key=rank)
        # Draw one that is nearly as good: other routers see the same loads, and should not choose the same.
        score, _, compute, *_ = first = ranked[0]
        most = score + compute * rules.num_untold / (1 + rules.num_untold)
        differs = (i for i, each in enumerate(ranked) if each[0] > most or rank(each) != rank(first))
        if (num := next(differs, len(ranked))) > 1:
            ranked.insert(0, ranked.pop(int(self._draw() * num)))
        return ranked

    def _lapse(self, now: float) -> None:
        """Take requests sent long ago to have begun, and the oldest to have ended, or never to have been sent."""
        before = now - self.rules.lapse_s
        if self._by_id and (oldest := next(iter(self._by_id.values()))).since <= before:
            self.completed(oldest.made.id, now)
        while self._reserved and self._reserved[0][0] <= before:
            _, replica = self._reserved.popleft()
            if replica in self._replicas:
                self._replicas[replica].lapse(before)

    def _fade(self, now: float) -> bool:
        """Forget a few notes of content that is cached by now, or never will be. Return whether there were any."""
        num = 0
        while num < _FADING_AT_ONCE and self._fading and self._fading[0][0] <= now:
            num += 1
            _, replica, keys = self._fading.popleft()
            if replica in self._replicas:
                self._expected.drop(replica, self._replicas[replica].erase(keys))
        return num > 0

    def _usual_token_s(self) -> float:
        return max([each.load.token_s for each in self._replicas.values()]) or _UNKNOWN_TOKEN_S

    def _replica(self, name: str) -> _Replica:
        try:
            return self._replicas[name]
        except KeyError:
            raise UnknownReplica(name, self._replicas) from None


def sparse(keys: Keys) -> Keys:
    """Return some of a prompt's keys: enough to know how much two prompts share, to 64 blocks or half of it."""
    return keys[_SPARSE_PLACES[: bisect_right(_SPARSE, len(keys))]]
