"""A tabulated function of a few numbers, linear between its places and beyond them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


class Multilinear:
    """Values at each combination of the axes' places, float64; linear along each axis, and beyond its ends as between the last two.

    A simulation reads one value at a time, many thousand times. So numbers give a number, by Python's lists, in a tenth of numpy's time; arrays
    give an array.
    """

    def __init__(self, axes: Sequence[Sequence[float]], table: Table) -> None:
        """Each axis is ascending, with at least two places."""
        assert table.shape == tuple(map(len, axes)), "a table has the shape of its axes"
        assert min(table.shape) > 1, "a line goes through two places"
        self.axes = [[float(place) for place in axis] for axis in axes]
        self.table = np.ascontiguousarray(table, np.float64)
        self._places = [np.array(axis) for axis in self.axes]
        self._flat: list[float] = self.table.ravel().tolist()
        self._strides = [stride // self.table.itemsize for stride in self.table.strides]

    def at(self, *sizes: Any) -> Any:
        """Return the value at these sizes, one for each axis, broadcast."""
        if any(isinstance(size, np.ndarray) for size in sizes):
            return self._of_arrays(sizes)
        corners = [(0, 1.0)]
        for size, axis, stride in zip(sizes, self.axes, self._strides):
            low = min(max(bisect_right(axis, size) - 1, 0), len(axis) - 2)
            share = (size - axis[low]) / (axis[low + 1] - axis[low])
            first = low * stride
            if share == 0.0:
                corners = [(place + first, weight) for place, weight in corners]
            elif share == 1.0:
                corners = [(place + first + stride, weight) for place, weight in corners]
            else:
                corners = [
                    corner
                    for place, weight in corners
                    for corner in ((place + first, weight * (1 - share)), (place + first + stride, weight * share))
                ]
        flat = self._flat
        return sum([flat[place] * weight for place, weight in corners])

    def _of_arrays(self, sizes: Sequence[Any]) -> Table:
        asked = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        lows, shares = [], []
        for size, places in zip(asked, self._places):
            low = np.clip(np.searchsorted(places, size, "right") - 1, 0, len(places) - 2)
            lows.append(low)
            shares.append((size - places[low]) / (places[low + 1] - places[low]))
        total: Table = np.zeros(asked[0].shape)
        for ends in product((0, 1), repeat=len(sizes)):
            weight: Any = 1.0
            for end, share in zip(ends, shares):
                weight = weight * (share if end else 1 - share)
            total += weight * self.table[tuple(low + end for low, end in zip(lows, ends))]
        return total
