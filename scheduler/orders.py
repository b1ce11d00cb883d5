"""In which order requests are served: by arrival, by priority, or so that each tenant gets its share.

A strategy is a subclass of `Order`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .fair_queue import FairQueue
from .lengths import OutputLengths
from .queues import Key, OrderedQueue, Queue
from .request import Request, RequestState
from .state import State


class Order:
    """This one serves requests as they arrive."""

    def key_of(self, request: Request, arrival: float, number: int) -> Key:
        """Where a request stands that arrived at a time, as the `number`-th; smaller is sooner."""
        return (0, arrival, number)

    def queue(self, lengths: OutputLengths) -> Queue:
        """Where requests wait: an empty queue, of a scheduler whose outputs become so long."""
        return OrderedQueue()

    def ended(self, request: RequestState) -> None:
        """The request, which was taken, has ended: what it took is known."""

    def violations(self, state: State) -> list[str]:
        """What of the waiting queue, or of the strategy's own books, is wrong."""
        orders = [request.order for request in state.waiting]
        return [] if orders == sorted(orders) else ["11: the waiting queue is out of order."]


class ByPriority(Order):
    """Smaller `Request.priority` first, equal ones as they arrive."""

    def key_of(self, request: Request, arrival: float, number: int) -> Key:
        return (request.priority, arrival, number)


class Fair(ByPriority):
    """Among requests of one priority, first those of the tenant that was given least for its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights

    def queue(self, lengths: OutputLengths) -> Queue:
        self._queue = FairQueue(self._weights, lengths)
        return self._queue

    def ended(self, request: RequestState) -> None:
        self._queue.ended(request)

    def violations(self, state: State) -> list[str]:
        return self._queue.violations(state.requests.values(), state.parked)
