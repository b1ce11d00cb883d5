"""Queues of live requests: each stands in one of four, in order.

waiting ──> running ⇄ away (loading, paused, swapped)
   ⇅            │
idle <──────────┘     waits for tokens from the caller, and holds no blocks
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

import numpy as np

from .request import RequestState, Status
from .rows import NO_ROWS, Counts, Rows

_order_of = attrgetter("order")
Key = tuple[int, float, int]
"""(priority, arrival, number) of a request; something else may stand for the arrival."""


class Queue:
    """Requests in the order in which they are admitted: by `RequestState.order`, which is unique. If they arrive in
    this order, adding one and removing the head are O(1). Other orders are subclasses."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []
        # Removing the head raises this. The list is cut when half of it is gone.
        self._head = 0
        # An attribute, because every step asks several times.
        self.num = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states[self._head :])

    def add(self, state: RequestState) -> None:
        states = self._states
        if not self.num or states[-1].order < state.order:
            states.append(state)
        else:
            states.insert(self._place_of(state), state)
        self.num += 1

    def head(self) -> RequestState:
        """Return the first request; there is one."""
        return self._states[self._head]

    def behind(self, count: int) -> list[RequestState]:
        """Return up to `count` requests that come after the first."""
        return self._states[self._head + 1 : self._head + 1 + count]

    def remove(self, state: RequestState) -> None:
        states, head = self._states, self._head
        self.num -= 1
        if states[head] is state:
            self._head = head = head + 1
            if 2 * head > len(states):
                del states[:head]
                self._head = 0
            return
        place = self._place_of(state)
        assert states[place] is state, "a request stands where its order says"
        del states[place]

    # Called for a request that is admitted.
    let_in = remove

    def _place_of(self, state: RequestState) -> int:
        return bisect_left(self._states, state.order, self._head, key=_order_of)

    def ended(self, state: RequestState) -> None:
        """Note that a request has ended."""

    def violations(self, requests: Iterable[RequestState], idle: Collection[str]) -> list[str]:
        """Return what is wrong in the queue or its books, given all requests and the `idle` ones."""
        orders = [state.order for state in self._states[self._head :]]
        return [] if orders == sorted(orders) else ["11: the waiting queue is out of order."]


class Running:
    """The running requests in order, and the array of their rows, int64 [n], in the same order. Rows that join last are
    appended, and rows that leave are masked out, once a step. Where a row's place is not known, it is made anew."""

    def __init__(self) -> None:
        # A dict, because a request leaves it wherever it stands, without a search.
        self._requests: dict[RequestState, None] = {}
        self._rows: Rows = NO_ROWS
        # Rows to append or to mask out, never both, and whether the array has to be made anew.
        self._joined: list[int] = []
        self._left: list[int] = []
        self._is_stale = False
        self.num = self.num_rows = 0
        # While it stays the same, the same rows run in the same order, and all of them get tokens, or none.
        self.version = 0
        # Computed and known tokens of all running rows after an update in which each sampled one: each has one to go.
        self.steady: tuple[Counts, Counts] | None = None

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)

    def change(self) -> None:
        """Note that a row joins or leaves, or that only some rows get tokens, or other than sampled ones."""
        self.version += 1
        self.steady = None

    def add(self, request: RequestState) -> None:
        """Add a request, and the rows that it has."""
        rows, last = request.live_rows, next(reversed(self._requests), None)
        is_last = last is None or last.order < request.order
        if self._left or not is_last:
            # First, because memory may be short.
            before = self.rows()
        if is_last:
            self._joined += rows
            self._requests[request] = None
        else:
            every = list(self._requests)
            place = bisect_left(every, request.order, key=_order_of)
            if self.num_rows == self.num:
                # All others have one row each, so the place of a row is that of its request.
                self._rows = np.concatenate([before[:place], rows, before[place:]])
            else:
                self._is_stale = True
            every.insert(place, request)
            self._requests = dict.fromkeys(every)
        self.num += 1
        self.num_rows += len(rows)
        self.change()

    def add_row(self) -> None:
        """Note one more row of a running request."""
        self._is_stale = True
        self.num_rows += 1
        self.change()

    def remove(self, request: RequestState) -> None:
        del self._requests[request]
        self.num -= 1
        self.leave(request.live_rows)

    def leave(self, rows: list[int]) -> None:
        """Remove rows of a request that goes on or ends."""
        self.num_rows -= len(rows)
        if self._joined:
            self.rows()
        self._left += rows
        self.change()

    def version_of(self, rows: Rows) -> int:
        """Return `version` if these are all running rows in order; else -1, and they have another version from now on."""
        # Most often it is the same array, which costs least to see.
        if len(rows) == self.num_rows and (rows is (mine := self.rows()) or rows.tobytes() == mine.tobytes()):
            return self.version
        if len(rows):
            self.change()
        return -1

    def settle(self, going: Counts | None, computed: Counts, known: Counts) -> None:
        """Set `steady` from the computed and known tokens of the rows before some ended, int64 [n] each. `going`: the
        places of those that go on, int64 [k]; None: all."""
        if going is not None:
            self._rows, self._left = self._rows[going], []
            computed, known = computed[going], known[going]
        self.steady = computed, known

    def take_steady(self) -> tuple[Counts, Counts] | None:
        """Return `steady`, and forget it, because the rows get other tokens from now on."""
        steady, self.steady = self.steady, None
        return steady

    def rows(self) -> Rows:
        if self._is_stale:
            self._rows = np.array([row for request in self for row in request.live_rows], np.int64)
            self._is_stale, self._joined, self._left = False, [], []
        elif self._joined:
            self._rows, self._joined = np.concatenate([self._rows, self._joined]), []
        elif self._left:
            stays = np.ones(max(*self._left, int(self._rows.max(initial=0))) + 1, np.bool_)
            stays[self._left] = False
            self._rows, self._left = self._rows[stays[self._rows]], []
        return self._rows


class Queues:
    def __init__(self, waiting: Queue) -> None:
        self.waiting = waiting
        self.running = Running()
        # Loading, paused and swapped requests.
        self.away = Queue()
        # Requests that gave their blocks up and compute nothing until the caller appends tokens.
        self.idle: dict[str, RequestState] = {}
        # No request can be admitted or return until one ends or comes, because decodes make no room.
        self.is_shut = False

    @property
    def num_in(self) -> int:
        """Number of running rows, and of requests that are away."""
        return self.running.num_rows + self.away.num

    def shut(self) -> None:
        self.is_shut = True

    def reopen(self) -> None:
        """Let requests be admitted or return again: one ended, came, or may need less."""
        self.is_shut = False

    def run(self, request: RequestState, step: int) -> None:
        request.resume(step)
        self.running.add(request)
        request.become(Status.RUNNING)

    def suspend(self, request: RequestState, status: Status) -> None:
        request.become(status)
        self.away.add(request)

    def wait(self, request: RequestState, *, is_idle: bool = False) -> None:
        """Let a request without rows wait: in the queue, or, if idle, for tokens from the caller."""
        request.become(Status.WAITING)
        if is_idle:
            self.idle[request.id] = request
        else:
            self.waiting.add(request)

    def requeue(self, request: RequestState) -> None:
        """Put the request into the queue if it is idle: it has tokens to compute now."""
        if self.idle.pop(request.id, None) is not None:
            self.waiting.add(request)

    def leave(self, request: RequestState) -> None:
        request.follow(None)
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is not Status.WAITING:
            self.away.remove(request)
        elif self.idle.pop(request.id, None) is None:
            self.waiting.remove(request)
