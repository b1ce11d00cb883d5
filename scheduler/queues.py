"""Requests in their order: smaller keys first, equal ones by the number in which they came.

Knows the order. Does not know what a request is waiting for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

from .request import RequestState

Key = tuple[int, float, int]
"""(priority, arrival, number) of a request, or what else stands for the arrival."""


class Queue(Protocol):
    """Requests that wait, in the order in which they are to be let in."""

    num: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestState]: ...

    def add(self, state: RequestState) -> bool:
        """Put a request in its place."""

    def head(self) -> RequestState:
        """The first one; there is one."""

    def behind(self, count: int) -> list[RequestState]:
        """Up to `count` that come after the first."""

    def remove(self, state: RequestState) -> None:
        """Take a request out; it is there."""

    def let_in(self, state: RequestState) -> None:
        """Take a request out that is admitted."""


class OrderedQueue:
    """Requests sorted by their `order`, which is unique. In order of arrival, adding and taking the head are O(1)."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []
        # The same orders by themselves: a search compares tuples, and calls no Python.
        self._orders: list[Key] = []
        # Heads are taken by moving this up; the lists are cut when half of them is gone.
        self._head = 0
        # How many there are: an attribute, because every step asks several times.
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states[self._head :])

    def add(self, state: RequestState) -> bool:
        """Put a request in its place; returns whether that is the last one."""
        states, orders, order = self._states, self._orders, state.order
        self.num += 1
        if self.num == 1 or orders[-1] < order:
            states.append(state)
            orders.append(order)
            return True
        place = bisect_left(orders, order, lo=self._head)
        states.insert(place, state)
        orders.insert(place, order)
        return False

    def place_of(self, state: RequestState) -> int:
        """How many stand before a request that is there."""
        return bisect_left(self._orders, state.order, lo=self._head) - self._head

    def head(self) -> RequestState:
        """The first one; there is one."""
        return self._states[self._head]

    def behind(self, count: int) -> list[RequestState]:
        """Up to `count` that come after the first."""
        return self._states[self._head + 1 : self._head + 1 + count]

    def remove(self, state: RequestState) -> None:
        """Take a request out; it is there."""
        states, head = self._states, self._head
        self.num -= 1
        if states[head] is state:
            self._head = head = head + 1
            if 2 * head > len(states):
                del states[:head], self._orders[:head]
                self._head = 0
            return
        place = bisect_left(self._orders, state.order, lo=head)
        assert states[place] is state, "a request stands where its order says"
        del states[place], self._orders[place]

    def let_in(self, state: RequestState) -> None:
        """Take a request out that is admitted; it is there, and keeps its order."""
        self.remove(state)
