"""Where each request stands: in one of four places, each in its order.

    waiting ──> running ⇄ away (loading, paused, swapped)
       ⇅            │
    parked <────────┘     waits for tokens from the caller, and holds no blocks

`Queues` is the only code that sets a request's status.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

from .request import RequestState
from .rows import RunningRows
from .status import Status

Key = tuple[int, float, int]
"""(priority, arrival, number) of a request, or what else stands for the arrival."""

_ENDED = {Status.FINISHED, Status.REJECTED, Status.ABORTED}
_NEXT = {
    Status.WAITING: {Status.WAITING, Status.RUNNING, Status.LOADING, *_ENDED},
    Status.LOADING: {Status.RUNNING, Status.WAITING, *_ENDED},
    Status.RUNNING: {Status.PAUSED, Status.SWAPPED, Status.WAITING, *_ENDED},
    Status.PAUSED: {Status.PAUSED, Status.SWAPPED, Status.RUNNING, Status.WAITING, *_ENDED},
    Status.SWAPPED: {Status.RUNNING, Status.WAITING, *_ENDED},
}


class Queue(Protocol):
    """Requests that wait, in the order in which they are to be let in."""

    num: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestState]: ...

    def add(self, state: RequestState) -> bool:
        """Put a request in its place. Returns whether that is known to be the last one."""

    def head(self) -> RequestState:
        """The first one; there is one."""

    def behind(self, count: int) -> list[RequestState]:
        """Up to `count` that come after the first."""

    def remove(self, state: RequestState) -> None:
        """Take a request out; it is there."""

    def let_in(self, state: RequestState) -> None:
        """Take a request out that is admitted."""


class OrderedQueue:
    """A `Queue` sorted by `RequestState.order`, which is unique. In order of arrival, adding and taking the head are O(1)."""

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
        return self._states[self._head]

    def behind(self, count: int) -> list[RequestState]:
        return self._states[self._head + 1 : self._head + 1 + count]

    def remove(self, state: RequestState) -> None:
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

    let_in = remove


class Queues:
    """All requests that are alive, and the rows of those that run."""

    def __init__(self, waiting: Queue) -> None:
        self.waiting = waiting
        self.running = OrderedQueue()
        # Requests with rows that do not run: loading, paused and swapped ones.
        self.away = OrderedQueue()
        # Waiting requests that have nothing to compute until the caller appends tokens: they gave their blocks up meanwhile.
        self.parked: dict[str, RequestState] = {}
        self.running_rows = RunningRows()

    @property
    def num_in(self) -> int:
        """Rows that run, and requests that are away; at most, while the array of rows has to be made anew."""
        return self.running_rows.num + self.away.num

    def run(self, request: RequestState) -> None:
        """Let a request run that has rows and stands nowhere."""
        running, running_rows, rows = self.running, self.running_rows, request.live_rows
        place = None
        at_end = running.add(request)
        if not at_end and len(rows) == 1 and running_rows.num + 1 == running.num:
            # All others have one row each, too.
            place = running.place_of(request)
        running_rows.join(rows, at_end=at_end, place=place)
        _turn(request, Status.RUNNING)

    def suspend(self, request: RequestState, status: Status) -> None:
        """Put a request away that stands nowhere: loading, paused or swapped."""
        _turn(request, status)
        self.away.add(request)

    def wait(self, request: RequestState) -> None:
        """Let a request wait that stands nowhere and has no rows."""
        _turn(request, Status.WAITING)
        self.waiting.add(request)

    def park(self, request: RequestState) -> None:
        """Let a request that stands nowhere and has no rows wait for tokens from the caller."""
        _turn(request, Status.WAITING)
        self.parked[request.id] = request

    def unpark(self, request: RequestState) -> None:
        """The request, if it is parked, has tokens to compute: it waits as the others do."""
        if self.parked.pop(request.id, None) is not None:
            self.waiting.add(request)

    def leave(self, request: RequestState, *, has_left_rows: bool = False) -> None:
        """Take the request out of where it stands. `has_left_rows`: its rows are no running ones any more."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if not has_left_rows:
                self.running_rows.leave(request.live_rows)
        elif request.status is not Status.WAITING:
            self.away.remove(request)
        elif self.parked.pop(request.id, None) is None:
            self.waiting.remove(request)

    def end(self, request: RequestState, status: Status) -> None:
        """The request, which stands nowhere, has ended."""
        _turn(request, status)


def _turn(request: RequestState, status: Status) -> None:
    assert status in _NEXT[request.status], f'request "{request.id}" turns from {request.status} to {status}'
    request.status = status
