"""Requests in their order: smaller keys first, equal ones by the number in which they came.

Knows the order. Does not know what a request is waiting for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.request import RequestState


def _key(state: RequestState) -> tuple[int, float, int]:
    return state.order


class OrderedQueue:
    """Requests sorted by their `order`, which is unique. In order of arrival, adding and taking the head are O(1)."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []
        # Heads are taken by moving this up; the list is cut when half of it is gone.
        self._head = 0

    def __len__(self) -> int:
        return len(self._states) - self._head

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states[self._head :])

    def add(self, state: RequestState) -> bool:
        """Put a request in its place; returns whether that is the last one."""
        states = self._states
        if len(states) == self._head or states[-1].order < state.order:
            states.append(state)
            return True
        insort(states, state, lo=self._head, key=_key)
        return False

    def head(self) -> RequestState:
        """The first one; there is one."""
        return self._states[self._head]

    def remove(self, state: RequestState) -> None:
        """Take a request out; it is there."""
        states, head = self._states, self._head
        if states[head] is state:
            self._head = head = head + 1
            if 2 * head > len(states):
                del states[:head]
                self._head = 0
            return
        place = bisect_left(states, state.order, lo=head, key=_key)
        assert states[place] is state, "a request stands where its order says"
        del states[place]
