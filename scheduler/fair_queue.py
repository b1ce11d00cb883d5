"""Tenants in fair order: first the tenant that was given least for its weight.

    tenant   weight   given per weight        waits
    a             1   |==============|        a7 a8 a9        the queue: b3 c1 b4 a7 ...
    b             2   |========|              b3 b4           each admission lengthens its tenant's bar
    c             1   |========|              c1              by (prompt + expected outputs) ÷ weight

Start-time fair queueing (Goyal, Vin and Cheng, 1996) of tokens: a bar ends at the virtual start of the tenant's next
request. It grows at admission, not at arrival, as in the Virtual Token Counter (Sheng et al., 2024). When the request
ends, what it took replaces the guess, which moves the tenant's next request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from .foresight import OutputLengths
from .queues import Key, Queue
from .request import RequestState, Status

MOST_IDLE = 1000
"""Most tenants without a live request that are remembered, because they were given more than others."""


class Tenant(msgspec.Struct, eq=False):
    name: str | None
    weight: float
    lane: Queue  # its waiting requests that were never admitted, by priority and arrival
    start: float = 0.0  # virtual time at which its next request starts: tokens per weight
    entry: Key | None = None  # (priority, start, number) of its first waiting request: the key of its place
    num_in: int = 0  # its requests that were admitted and have not ended


class FairQueue(Queue):
    """Within a priority, requests that were admitted before come first, in order; then tenants by virtual start."""

    def __init__(self, weights: Mapping[str, float], lengths: OutputLengths) -> None:
        """`weights`: of tenants by name, 1 for those not named. `lengths`: of ended outputs."""
        self._weights = dict[str | None, float](weights.items())
        self._lengths = lengths
        # Tenants with a live request; and idle ones that were given more than waiting ones, longest idle first.
        self._tenants: dict[str | None, Tenant] = {}
        self._idle: OrderedDict[str | None, Tenant] = OrderedDict()
        self._entries: list[tuple[Key, Tenant]] = []
        self._returned = Queue()
        # The largest virtual start of admitted requests, and their number.
        self._virtual_time = 0.0
        self._turn = 0
        self.num = 0

    def __iter__(self) -> Iterator[RequestState]:
        returned = (((state.order[0], 0, 0.0, place), state) for place, state in enumerate(self._returned))
        return (state for _, state in heapq.merge(returned, self._never_in()))

    def add(self, state: RequestState) -> None:
        self.num += 1
        if not state.is_new:
            self._returned.add(state)
            return
        name = state.request.tenant
        tenant = self._tenants.get(name) or self._idle.pop(name, None)
        self._tenants[name] = tenant = tenant or Tenant(name, self._weights.get(name, 1.0), Queue())
        if not tenant.lane.num:
            # A tenant gains no credit while it has nothing waiting: it starts with the first that waits in this priority.
            place = bisect_left(self._entries, ((state.order[0], -math.inf, 0),))
            first = [entry[1] for entry, _ in self._entries[place : place + 1] if entry[0] == state.order[0]]
            tenant.start = max(tenant.start, min([self._virtual_time, *first]))
        tenant.lane.add(state)
        self._stand(tenant)

    def head(self) -> RequestState:
        if self._returned.num:
            first = self._returned.head()
            if not self._entries or first.order[0] <= self._entries[0][0][0]:
                return first
        return self._entries[0][1].lane.head()

    def behind(self, count: int) -> list[RequestState]:
        return list(islice(self, 1, count + 1))

    def remove(self, state: RequestState) -> None:
        self.num -= 1
        if not state.is_new:
            self._returned.remove(state)
            return
        tenant = self._tenants[state.request.tenant]
        tenant.lane.remove(state)
        self._stand(tenant)

    def let_in(self, state: RequestState) -> None:
        """Remove an admitted request. At its first admission, charge its tenant, and let its turn order it."""
        if not state.is_new:
            self.remove(state)
            return
        tenant = self._tenants[state.request.tenant]
        self._virtual_time = max(self._virtual_time, tenant.start)
        cost = self._expected_cost(state)
        tenant.start += cost / tenant.weight
        tenant.num_in += 1
        self.remove(state)
        self._turn += 1
        state.charge(cost, float(self._turn))

    def ended(self, state: RequestState) -> None:
        """Charge the tenant of an ended request for what it took, not for the guess; nothing if it never entered."""
        if state.is_new:
            return
        tenant = self._tenants[state.request.tenant]
        tenant.num_in -= 1
        # It took the tokens that were not cached, and its outputs.
        num_sequences = state.request.num_sequences
        known = num_sequences * state.prompt_len + sum(state.appended[:num_sequences]) - state.hit_tokens
        tenant.start -= (state.charged - max(0, known) - state.num_output) / tenant.weight
        self._stand(tenant)

    def violations(self, requests: Iterable[RequestState], idle: Collection[str]) -> list[str]:
        """Return where the tenants' books, or the order of the queue, are wrong. `requests`: all live ones."""
        every, found, tenants = list(requests), [], self._tenants.values()
        new = {(state.request.tenant, state.id) for state in every if state.is_new}
        admitted = [state for state in every if not state.is_new]
        returned = {state.id for state in admitted if state.status is Status.WAITING and state.id not in idle}
        if {state.id for state in self._returned} != returned:
            found.append("9: those who wait again are not those in the queue.")
        lanes = {(tenant.name, state.id) for tenant in tenants for state in tenant.lane}
        num_in = Counter({tenant.name: tenant.num_in for tenant in tenants})
        if (lanes, num_in) != (new, Counter(state.request.tenant for state in admitted)):
            found.append("9: tenants have other requests than their books say.")
        for tenant in tenants:
            if tenant.entry != _entry_of(tenant):
                found.append(
                    f"11: tenant {tenant.name!r} stands at {tenant.entry}, and belongs at {_entry_of(tenant)}."
                )
        entries = [tenant.entry for tenant in tenants if tenant.entry is not None]
        if [entry for entry, _ in self._entries] != sorted(entries):
            found.append("11: the waiting queue is out of order.")
        if self.num != len(new) + len(returned):
            found.append(f"9: {self.num} requests wait by count.")
        if len(self._idle) > MOST_IDLE or not all(math.isfinite(tenant.start) for tenant in tenants):
            found.append(f"11: {len(self._idle)} idle tenants are remembered, or one's virtual start is no number.")
        return found

    def _never_in(self) -> Iterator[tuple[tuple[int, int, float, int], RequestState]]:
        """Iterate (key, request) of requests never admitted, in order. Each starts where its tenant's last one ends."""
        lanes: dict[str | None, list[RequestState]] = {}
        # Sorted, and so a heap. (priority, start, number) is unique, so tenants are never compared.
        heap = [(entry, 0, tenant) for entry, tenant in self._entries]
        while heap:
            (priority, start, number), place, tenant = heap[0]
            lane = lanes.get(tenant.name) or lanes.setdefault(tenant.name, list(tenant.lane))
            state = lane[place]
            yield (priority, 1, start, number), state
            if place + 1 == len(lane):
                heapq.heappop(heap)
                continue
            behind = lane[place + 1].order
            start += self._expected_cost(state) / tenant.weight
            heapq.heapreplace(heap, ((behind[0], start, behind[2]), place + 1, tenant))

    def _stand(self, tenant: Tenant) -> None:
        """Put the tenant at its first waiting request. Forget it if it has no request, and got no more than others."""
        entry = _entry_of(tenant)
        if entry != tenant.entry:
            if tenant.entry is not None:
                del self._entries[bisect_left(self._entries, (tenant.entry,))]
            if entry is not None:
                insort(self._entries, (entry, tenant))
            tenant.entry = entry
        if tenant.lane.num or tenant.num_in:
            return
        del self._tenants[tenant.name]
        if not self._tenants:
            self._idle.clear()
        elif tenant.start > self._virtual_time:
            self._idle[tenant.name] = tenant
            if len(self._idle) > MOST_IDLE:
                self._idle.popitem(last=False)

    def _expected_cost(self, state: RequestState) -> int:
        """Return the tokens that a request will take: its prompt once, and the guessed outputs of each sequence."""
        most, wish = state.max_total[0] - state.prompt_len, state.request.expected_tokens
        if wish is None:
            mean = self._lengths.mean
            wish = most if mean is None else round(mean)
        return state.prompt_len + len(state.rows) * max(1, min(wish, most))


def _entry_of(tenant: Tenant) -> Key | None:
    if not tenant.lane.num:
        return None
    priority, _, number = tenant.lane.head().order
    return (priority, tenant.start, number)
