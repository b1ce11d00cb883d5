"""Waiting requests: those that find most of their tokens cached come first, within a lead.

    waits   came at   cached     served, with a lead of 60 s
    a         0 s       0        c, b, a, d: c and b came at most 60 s after a and pass it; d came too late for that
    b        30 s     2,000
    c        50 s     9,000
    d        70 s     9,900

So the next turn of a conversation enters while its prefix is still cached. First come, first served would evict the
prefix for requests that came before. SGLang's `lpm` has this order, too (Zheng et al., 2024), but without a bound: here
a request waits only for others that came within the lead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from paged.block_manager import Memory

from .queues import Queue
from .request import RequestState


class CachedQueue(Queue):
    """Within a priority, requests that were admitted before come first, then the one with most cached tokens."""

    def __init__(self, memory: Memory, lead: float) -> None:
        """`lead`: a request may pass others that came at most so many seconds before it."""
        super().__init__()
        self._memory, self._lead = memory, lead
        # By id, the cached tokens when they were last looked up: at arrival, and when the request came first.
        self._cached: dict[str, int] = {}

    def __iter__(self) -> Iterator[RequestState]:
        states, num, gone = self._states[self._head :], 0, set[str]()
        rivals: list[tuple[tuple[int, bool, int, float, int], RequestState]] = []
        for first in states:
            while first.id not in gone:
                while num < len(states) and self._may_pass(states[num], first):
                    heappush(rivals, (self._rank(states[num]), states[num]))
                    num += 1
                _, best = heappop(rivals)
                cached = cached_tokens(self._memory, best)
                if cached < self._cached[best.id]:
                    # Some of it was evicted: it may no longer be the first.
                    self._cached[best.id] = cached
                    heappush(rivals, (self._rank(best), best))
                else:
                    gone.add(best.id)
                    yield best

    def add(self, state: RequestState) -> None:
        super().add(state)
        self._cached[state.id] = cached_tokens(self._memory, state)

    def head(self) -> RequestState:
        return next(iter(self))

    def behind(self, count: int) -> list[RequestState]:
        # Not those that came too late to pass the earliest one, even if that one does not fit.
        return [state for state in islice(self, 1, count + 1) if self._may_pass(state, self._states[self._head])]

    def remove(self, state: RequestState) -> None:
        super().remove(state)
        del self._cached[state.id]

    let_in = remove

    def violations(self, requests: Iterable[RequestState], idle: Collection[str]) -> list[str]:
        found = super().violations(requests, idle)
        if self._cached.keys() != {state.id for state in self._states[self._head :]}:
            found.append("9: those with cached tokens are not those in the queue.")
        return found

    def _may_pass(self, state: RequestState, first: RequestState) -> bool:
        return state.order[0] == first.order[0] and state.order[1] <= first.order[1] + self._lead

    def _rank(self, state: RequestState) -> tuple[int, bool, int, float, int]:
        priority, arrival, number = state.order
        return (priority, state.is_new, -self._cached[state.id], arrival, number)


def cached_tokens(memory: Memory, state: RequestState) -> int:
    """Return the tokens that a waiting request would find now, on the device and the host."""
    if not state.request.reads_cache:
        return 0
    hit = memory.content.lookup(state.first_tokens, state.root)
    return hit.num_tokens + hit.host_tokens
