"""A tabulated function of a few sizes: logarithms on a grid, interpolated."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.study.hardware.kernels.completion import completed

STEP = 0.04
"""Logarithms are multiples of it, which puts a value off by at most 2 %, by 1 % in the median."""


class Grid(msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=False):
    """Logarithms at each combination of the axes' values, interpolated over the axes' logarithms.

    axes   by name the values of each axis, ascending, above 0
    steps  the logarithms ÷ STEP, int16 [one dimension an axis]
    """

    axes: dict[str, list[int]]
    steps: NDArray[np.int16]

    @classmethod
    def of(cls, logarithms: NDArray[np.float64], axes: dict[str, list[int]]) -> Grid:
        """Make a grid, and fill NaN in from its neighbours. At least one value has to be known."""
        places = tuple(np.log(np.asarray(ticks, np.float64)) for ticks in axes.values())
        steps = np.round(completed(logarithms, places) / STEP).clip(-32768, 32767).astype(np.int16)
        return cls(axes=axes, steps=steps)

    def at(self, *sizes: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithm at these sizes, one for each axis, broadcast; outside of an axis the one at its edge."""
        asked = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        corners: list[tuple[list[Any], Any]] = [([], 1.0)]
        for place, ticks in zip(asked, self._places):
            position = np.interp(np.log(place), ticks, np.arange(len(ticks)))
            low = np.minimum(position.astype(np.intp), max(len(ticks) - 2, 0))
            high = np.minimum(low + 1, len(ticks) - 1)
            share = position - low
            ends = ((low, 1 - share), (high, share))
            corners = [([*index, end], weight * part) for index, weight in corners for end, part in ends]
        total = np.zeros(asked[0].shape)
        for index, weight in corners:
            total = total + weight * self.steps[tuple(index)]
        return total * STEP

    def beyond(self, *sizes: ArrayLike) -> dict[str, float]:
        """Return by axis how many times a size is above its last value, or below its first, without axes that hold all sizes."""
        found = {}
        for (name, ticks), size in zip(self.axes.items(), sizes):
            asked = np.asarray(size, np.float64)
            factor = float(np.max(np.maximum(asked / ticks[-1], ticks[0] / asked)))
            if factor > 1:
                found[name] = factor
        return found

    @cached_property
    def _places(self) -> list[NDArray[np.float64]]:
        return [np.log(np.asarray(ticks, np.float64)) for ticks in self.axes.values()]
