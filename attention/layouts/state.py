"""What a layer keeps of a sequence as a whole, on k pages: units, each within one page, such as a head's matrix.

    shape [5, ...], 5 units, 2 a page         page 0 | 0 | 1 |     page 1 | 2 | 3 |     page 2 | 4 |

Units side by side are read together, and so are pages that look the same: the state above takes two gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged.errors import InvalidPool

from ..pages import Pages


class StatePlace(NamedTuple):
    """Where a piece of a layer's state lies, and what it is: see State."""

    places: Sequence[tuple[int, int]]
    unit_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Stretch(NamedTuple):
    """`units` units a page on `parts` pages, from unit `first` and page `part` on; `view`: [pages, units, elements]."""

    first: int
    part: int
    parts: int
    units: int
    view: Tensor


class State:
    """One piece of a layer's state, as a tensor a sequence.

    places      (part, offset in bytes) of each unit, in their order
    unit_bytes  bytes for a unit, at least those of its elements
    shape       of the piece; a unit has ceil(shape[0] / units) slices of its first dimension
    Raises InvalidPool if `unit_bytes` are too few.
    """

    def __init__(
        self,
        pages: Pages,
        places: Sequence[tuple[int, int]],
        unit_bytes: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        # For code that reads it where it lies: the pages, and the part and offset in bytes of each unit, int64 [units].
        self.pages = pages
        self.parts, self.offsets = np.ascontiguousarray(np.array(places, np.int64).T)
        self._device = pages.device
        self._scratch = pages.num_pages
        self._elements = -(-self.shape[0] // len(places)) * math.prod(self.shape[1:])
        if self._elements * dtype.itemsize > unit_bytes:
            raise InvalidPool(
                f"a unit of {unit_bytes} bytes has no room for {self._elements} elements of {dtype}, one of {len(places)} units of {self.shape}."
            )
        self._num_units = len(places)
        self._stretches = [self._stretch(pages, unit_bytes, *found) for found in _stretches(places, unit_bytes)]

    def read(self, sources: Tensor) -> Tensor:
        """Return what these pages, int [n, k], hold, as a new tensor [n, *shape]. A row of -1 reads as zeros."""
        index = sources.to(self._device, torch.int64)
        index = torch.where(index < 0, self._scratch, index)
        parts = [
            each.view.index_select(0, index[:, each.part : each.part + each.parts].reshape(-1)).view(
                len(index), each.parts * each.units * self._elements
            )
            for each in self._stretches
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return whole[:, : math.prod(self.shape)].reshape(len(index), *self.shape)

    def write(self, destinations: Tensor, values: Tensor, *, is_whole: bool = False) -> None:
        """Write values, [n, *shape], to these distinct pages, int [n, k]; a row of -1 is not written. `is_whole`
        promises that there is no -1, which saves a read from the device."""
        index = destinations.to(self._device, torch.int64)
        if not is_whole:
            is_written = index[:, 0] >= 0
            index, values = index[is_written], values[is_written]
        whole = values.reshape(len(index), math.prod(self.shape)).to(self.dtype)
        missing = self._num_units * self._elements - whole.shape[1]
        if missing:
            whole = torch.nn.functional.pad(whole, (0, missing))
        for each in self._stretches:
            first, count = each.first * self._elements, each.parts * each.units * self._elements
            its = whole[:, first : first + count].reshape(-1, each.units, self._elements)
            each.view.index_copy_(0, index[:, each.part : each.part + each.parts].reshape(-1), its)

    def _stretch(
        self, pages: Pages, unit_bytes: int, first: int, part: int, parts: int, units: int, offset: int
    ) -> _Stretch:
        size = self.dtype.itemsize
        if unit_bytes % size:
            raise InvalidPool(f"units of {unit_bytes} bytes: {self.dtype} takes multiples of {size}.")
        view = pages.view(
            self.dtype,
            offset,
            (pages.num_pages + 1, units, self._elements),
            (pages.page_bytes // size, unit_bytes // size, 1),
        )
        return _Stretch(first, part, parts, units, view)


def _stretches(places: Sequence[tuple[int, int]], unit_bytes: int) -> list[tuple[int, int, int, int, int]]:
    """Return the fewest stretches with all units in order: (first unit, first part, parts, units a part, offset)."""
    ends = [i + 1 for i, (a, b) in enumerate(pairwise(places)) if (b[0], b[1]) != (a[0], a[1] + unit_bytes)]
    found: list[tuple[int, int, int, int, int]] = []
    for first, stop in pairwise([0, *ends, len(places)]):
        (part, offset), units = places[first], stop - first
        if found:
            start, its_part, parts, its_units, its_offset = found[-1]
            if (its_part + parts, its_units, its_offset) == (part, units, offset):
                found[-1] = (start, its_part, parts + 1, units, offset)
                continue
        found.append((first, part, 1, units, offset))
    return found
