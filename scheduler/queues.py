"""Queues of live requests: each stands in one of four, in order.

waiting ──> running ⇄ away (loading, paused, swapped)
   ⇅            │
idle <──────────┘     waits for tokens from the caller, and holds no blocks
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from .request import RequestState, Status
from .rows import Running

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
        self.num += 1
        if not states or states[-1].order < state.order:
            states.append(state)
        else:
            states.insert(bisect_left(states, state.order, self._head, key=_order_of), state)

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
        place = bisect_left(states, state.order, head, key=_order_of)
        assert states[place] is state, "a request stands where its order says"
        del states[place]

    # Called for a request that is admitted.
    let_in = remove

    def ended(self, state: RequestState) -> None:
        """Note that a request has ended."""

    def violations(self, requests: Iterable[RequestState], idle: Collection[str]) -> list[str]:
        """Return what is wrong in the queue or its books, given all requests and the `idle` ones."""
        orders = [state.order for state in self._states[self._head :]]
        return [] if orders == sorted(orders) else ["11: the waiting queue is out of order."]


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
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is not Status.WAITING:
            self.away.remove(request)
        elif self.idle.pop(request.id, None) is None:
            self.waiting.remove(request)
