"""Five objects decide: the order of requests, who comes in, what is reserved, what a step computes, and who gives blocks up.

Each is chosen here by a policy's words, once, when a scheduler is made; nothing else reads those words. Knows which class each word names.
Does not know how any of them decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .admission import Admission
from .composition import Composition, DecodesFirst
from .modelled.interleaving import Apart
from .modelled.lockstep import Lockstep
from .modelled.orca import InRegions, context, expected, expected_pow2
from .modelled.whole_batches import Longest, WholeBatches
from .orders import ByPriority, Fair, Order
from .policies import Policy
from .preemption import FewestBlocks, Swaps, Victims, by_cost
from .reservations import Counted, Drawn, Reservation, most

_ADMISSIONS = {"continuous": Admission, "whole": WholeBatches}
_TOTALS = {"max": most, "expected": expected, "pow2": expected_pow2, "context": context}
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
    """The objects that the words of a policy name, for a pool of so many blocks and tenants of these weights."""
    reservation = _reservation(policy, num_blocks)
    takes_plain_ones = policy.chunked and policy.batching == "continuous" and not reservation.reserves
    return Strategies(
        reservation,
        _ADMISSIONS[policy.batching](policy, takes_plain_ones=takes_plain_ones),
        _composition(policy),
        _VICTIMS[policy.victim](takes_whole=policy.take == "whole", swaps=_SWAPS[policy.preemption]),
        _order(policy, tenant_weights),
    )


def _order(policy: Policy, tenant_weights: Mapping[str, float]) -> Order:
    match policy.order:
        case "fair":
            return Fair(tenant_weights)
        case "priority":
            return ByPriority()
    return Order()


def _reservation(policy: Policy, num_blocks: int) -> Reservation:
    if policy.reservation == "prompt":
        return Reservation()
    if policy.reservation == "longest":
        return Longest()
    total_of = _TOTALS[policy.reservation]
    match policy.layout:
        case "counted":
            return Counted(total_of)
        case "region":
            return InRegions(total_of, num_blocks)
    return Drawn(total_of)


def _composition(policy: Policy) -> Composition:
    match policy.composition:
        case "decodes_first":
            return DecodesFirst()
        case "apart":
            return Apart(ratio=policy.waiting_served_ratio, most_steps=policy.max_waiting_steps)
        case "lockstep":
            return Lockstep(is_padded=policy.padding == "left")
    return Composition()
