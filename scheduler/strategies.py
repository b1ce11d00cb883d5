"""Five objects decide: the order of requests, who comes in, what is reserved, what a step computes, and who gives blocks up.

Each is chosen here by a policy's words, once, when a scheduler is made; nothing else reads those words. `Policy.strategies` may replace any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paged.errors import InvalidConfig

from .admission import Admission
from .composition import Composition, DecodesFirst
from .orders import ByPriority, Fair, Order
from .policies import Policy
from .preemption import FewestBlocks, Swaps, Victims, by_cost
from .reservations import Drawn, Reservation, expected, most

_TOTALS = {"max": most, "expected": expected}
_VICTIMS = {"latest": Victims, "fewest_blocks": FewestBlocks}
_SWAPS: dict[str, Swaps] = {"recompute": lambda *_: False, "swap": lambda *_: True, "cheapest": by_cost}


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
    usual = Strategies(
        _reservation(policy),
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


def _reservation(policy: Policy) -> Reservation:
    if policy.reservation == "prompt":
        return Reservation()
    return Drawn(_TOTALS[policy.reservation], is_counted=policy.layout == "counted")
