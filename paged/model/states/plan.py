"""What state layers keep, for a plan of pages: the pieces that a trial run found.

A piece of several heads has a unit for each head. A piece with a row for each channel has 64 units if these divide it, the tail of a convolution has
four, and any other piece one. `kept_layers` computes the same from a configuration alone; `check_plan` compares the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paged.attention import StatePlace
from paged.errors import UnsupportedModel
from paged.model.kept_layers import CONV_PIECES, Sizes, kept_layers
from paged.model.layer_plan import Layers, Part
from paged.model.places import Pieces
from paged.model.states.layer import KeepsState
from paged.model.states.seams import Piece

# Offsets of units are multiples of this, in bytes.
_ALIGNED = 16
_ROWS = 64


def num_units(piece: Piece) -> int:
    """Return the number of units of a piece, along its first dimension."""
    if piece.name.startswith("conv"):
        return CONV_PIECES
    if len(piece.shape) == 2:
        return _ROWS if piece.shape[0] % _ROWS == 0 else 1
    return piece.shape[0] if len(piece.shape) > 2 else 1


def unit_elements(piece: Piece) -> int:
    """Return the elements of one unit of a piece."""
    return -(-piece.shape[0] // num_units(piece)) * math.prod(piece.shape[1:])


def layers_of(layer: KeepsState) -> Layers:
    """Return what a state layer keeps: a part for each piece, in their order."""
    parts = []
    for piece in layer.pieces:
        size = unit_elements(piece) * piece.dtype.itemsize
        parts.append(Part(units=num_units(piece), unit_bytes=-(-size // _ALIGNED) * _ALIGNED))
    return Layers(kind="state", count=1, parts=tuple(parts))


def state_places(layer: KeepsState, places: Pieces) -> list[StatePlace]:
    """Return the place of each piece of a state layer, given the places of the units that `layers_of` has."""
    return [
        StatePlace(of_piece, part.unit_bytes, piece.shape, piece.dtype)
        for piece, of_piece, part in zip(layer.pieces, places, layers_of(layer).parts, strict=True)
    ]


def check_plan(layers: Sequence[KeepsState], config: Any, name: Path) -> None:
    """Raise UnsupportedModel unless the layers keep as many elements, in as many units, as their configuration says; else as `kept_layers` does."""
    planned = Counter[int]()
    for each in kept_layers(config, Sizes(element=1, state=1, token_id=1)):
        for part in each.parts:
            planned[part.unit_bytes] += part.units * each.count
    found = _counted(piece for layer in layers for piece in layer.pieces)
    if planned == found:
        return
    where = "its layers together"
    for layer in layers:
        if _counted(layer.pieces).keys() - planned.keys():
            where = f"{layer.path} ({', '.join(f'{p.name}: {p.shape}' for p in layer.pieces)})"
            break
    raise UnsupportedModel(
        f"{name}: its state layers keep other than their configuration says, {where}: {_said(found)}; planned are {_said(planned)}."
    )


def _counted(pieces: Iterable[Piece]) -> Counter[int]:
    counts = Counter[int]()
    for piece in pieces:
        counts[unit_elements(piece)] += num_units(piece)
    return counts


def _said(counts: Counter[int]) -> str:
    return " and ".join(f"{number} units of {size:,} elements" for size, number in sorted(counts.items())) or "nothing"
