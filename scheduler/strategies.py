"""Five objects decide: the order of requests, who comes in, what is reserved, what a step computes, and who gives blocks up.

Each is chosen here by a policy's words, once, when a scheduler is made; nothing else reads those words. `Policy.strategies` may replace any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paged.errors import InvalidConfig

from .admission import Admission
from .composition import Composition, DecodesFirst
from .fair_queue import FairQueue
from .lengths import OutputLengths
from .policies import Policy
from .preemption import FewestBlocks, Swaps, Victims, by_cost
from .queues import Key, OrderedQueue, Queue
from .request import Request, RequestState
from .reservations import Drawn, Reservation, expected, most
from .state import State

_TOTALS = {"max": most, "expected": expected}
_VICTIMS = {"latest": Victims, "fewest_blocks": FewestBlocks}
_SWAPS: dict[str, Swaps] = {"recompute": lambda *_: False, "swap": lambda *_: True, "cheapest": by_cost}


class Order:
    """In which order requests are served: this one, as they arrive."""

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


class Strategies(NamedTuple):
    """What a policy combines."""

    reservation: Reservation
    admission: Admission
    composition: Composition
    victims: Victims
    order: Order


def strategies_of(policy: Policy, num_blocks: int, tenant_weights: Mapping[str, float]) -> Strategies:
    """The strategies of a policy, for a pool of so many blocks and tenants of these weights. Raises InvalidConfig."""
    orders = {"fcfs": Order(), "priority": ByPriority(), "fair": Fair(tenant_weights)}
    drawn = Drawn(_TOTALS.get(policy.reservation, most), is_counted=policy.layout == "counted")
    usual = Strategies(
        Reservation() if policy.reservation == "prompt" else drawn,
        Admission(policy),
        DecodesFirst() if policy.composition == "decodes_first" else Composition(),
        _VICTIMS[policy.victim](takes_whole=policy.take == "whole", swaps=_SWAPS[policy.preemption]),
        orders[policy.order],
    )
    if policy.strategies is None:
        return usual
    found = policy.strategies(policy, usual, num_blocks)
    kinds = (Reservation, Admission, Composition, Victims, Order)
    if not isinstance(found, Strategies) or not all(map(isinstance, found, kinds)):
        raise InvalidConfig(f"policy {policy.name}: strategies has to return Strategies; got {found!r}.")
    return found
