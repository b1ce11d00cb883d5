"""Strategies of a policy: the order of requests, admission, reservation, composition and victims. The policy's words
choose them here, once for each scheduler; no other module reads these words. `Policy.strategies` may replace any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paged.block_manager import Memory
from paged.errors import InvalidConfig

from .admission import Admission
from .cached_queue import CachedQueue
from .composition import Composition
from .fair_queue import FairQueue
from .foresight import OutputLengths
from .policies import Policy
from .preemption import Swaps, Victims
from .queues import Key, Queue
from .request import Request
from .reservations import Reservation, Totals, expected, most

MakeQueue = Callable[[OutputLengths, Memory], Queue]
_TOTALS: dict[str, Totals | None] = {"prompt": None, "max": most, "expected": expected}
_SWAPS: dict[str, Swaps] = {
    "recompute": lambda *_: False,
    "swap": lambda *_: True,
    "cheapest": lambda costs, lost, num_blocks: costs.swap(num_blocks) < sum(costs.recompute(*each) for each in lost),
}


class Order:
    """The order in which requests are served: as they arrive; or, `by_priority`, the smaller `Request.priority` first.
    `make_queue` returns the queue that orders requests of equal priority."""

    def __init__(self, *, by_priority: bool = False, make_queue: MakeQueue = lambda *_: Queue()) -> None:
        self._by_priority, self._make_queue = by_priority, make_queue

    def key_of(self, request: Request, arrival: float, number: int) -> Key:
        """Return the key of the `number`-th request, which came at `arrival`; smaller is sooner."""
        return (request.priority if self._by_priority else 0, arrival, number)

    def queue(self, lengths: OutputLengths, memory: Memory) -> Queue:
        """Return an empty queue for waiting requests, given the `lengths` of ended outputs, and the `memory` to ask."""
        return self._make_queue(lengths, memory)


class Strategies(NamedTuple):
    reservation: Reservation
    admission: Admission
    composition: Composition
    victims: Victims
    order: Order


def strategies_of(policy: Policy, num_blocks: int, tenant_weights: Mapping[str, float]) -> Strategies:
    """Return the strategies of a policy, for a pool of so many blocks. Raises InvalidConfig."""
    orders = {
        "fcfs": Order(),
        "priority": Order(by_priority=True),
        "fair": Order(by_priority=True, make_queue=lambda lengths, _: FairQueue(tenant_weights, lengths)),
        "cached": Order(by_priority=True, make_queue=lambda _, memory: CachedQueue(memory, policy.max_lead or 0.0)),
    }
    fewest_first, takes_whole = policy.victim == "fewest_blocks", policy.take == "whole"
    usual = Strategies(
        Reservation(_TOTALS[policy.reservation], is_counted=policy.layout == "counted"),
        Admission(policy),
        Composition(decodes_first=policy.composition == "decodes_first"),
        Victims(takes_whole=takes_whole, swaps=_SWAPS[policy.preemption], fewest_first=fewest_first),
        orders[policy.order],
    )
    if policy.strategies is None:
        return usual
    found = policy.strategies(policy, usual, num_blocks)
    kinds = (Reservation, Admission, Composition, Victims, Order)
    if not isinstance(found, Strategies) or not all(map(isinstance, found, kinds)):
        raise InvalidConfig(f"policy {policy.name}: strategies has to return Strategies; got {found!r}.")
    return found
