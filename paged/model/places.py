"""The place of each unit of a layer plan: which page of a block or state, and from which byte on.

    3 layers, K and V of 64 bytes a block, pages of 256 bytes, 2 pages a block

    part 0 | K of 0 | V of 0 | K of 1 | V of 1 |
    part 1 | K of 2 | V of 2 |                 |

A place is a constant of the model. Units of one size on one page lie side by side, in the order of layers, so the heads of one state are few
pieces of memory, each as long as its page allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from paged.errors import InvalidConfig
from paged.model.layer_plan import Group, LayerPlan, Layers, merged_units, packing

ALIGNED = 16
"""The offset of every unit is a multiple of this, in bytes."""


class Place(NamedTuple):
    """The place of a unit: page `part` of the k pages, from byte `offset` on."""

    part: int
    offset: int


Pieces = tuple[tuple[Place, ...], ...]
"""The places of a layer's units, by piece: one unit for each piece of an entry, all units for each part of a state."""


def places_of(group: Group, page_bytes: int) -> list[Pieces]:
    """Return the places of a group's layers, in the order of `group.layers`, those of one shape side by side.

    Raises InvalidConfig for a unit whose bytes are no multiple of ALIGNED.
    """
    layers = [_units_of(each, group.block_tokens) for each in group.layers for _ in range(each.count)]
    units = merged_units(unit for pieces in layers for unit in pieces)
    odd = [size for size, _ in units if size % ALIGNED]
    if odd:
        tokens = group.block_tokens * math.lcm(*(ALIGNED // math.gcd(size, ALIGNED) for size in odd))
        raise InvalidConfig(
            f"{group.kind} layers: a unit has {odd[0]} bytes; units are multiples of {ALIGNED}, so that each begins at one. "
            + (f"Take block_size={tokens}." if tokens else "No option changes those of a state.")
        )
    free = dict(zip((size for size, _ in units), _free_places(units, page_bytes), strict=True))
    return [tuple(tuple(next(free[size]) for _ in range(number)) for size, number in pieces) for pieces in layers]


def _units_of(layers: Layers, block_tokens: int) -> list[tuple[int, int]]:
    """Return (bytes, number) of the units of each piece of one layer."""
    return [(size, number // layers.count) for size, number in layers.units(block_tokens)]


def _free_places(units: Sequence[tuple[int, int]], page_bytes: int) -> list[Iterator[Place]]:
    """Return the places of units of each size in the packing, page by page."""
    found: list[list[Place]] = [[] for _ in units]
    parts = count()
    for mixture, times in packing(units, page_bytes):
        for _ in range(times):
            part, offset = next(parts), 0
            for of_size, (size, _), takes in zip(found, units, mixture, strict=True):
                of_size += [Place(part, offset + size * i) for i in range(takes)]
                offset += size * takes
    return [iter(each) for each in found]


def located(layers: Sequence[Layers], plan: LayerPlan) -> list[tuple[int, int]]:
    """Return (group, layer within the group) of each of the layers that the plan was made for; one with `count` n counts as n."""
    numbers = [count() for _ in plan.groups]
    found = []
    for each in layers:
        group = next(i for i, its in enumerate(plan.groups) if each in its.layers)
        found += [(group, next(numbers[group])) for _ in range(each.count)]
    return found
