"""Tabulated functions of a few sizes: logarithms on a grid, kept at its edges; numbers that go on in straight lines; and a file's grids as one text."""

import base64
import math
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
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
    def of(cls, logarithms: NDArray[np.float64], axes: dict[str, list[int]]) -> "Grid":
        """Make a grid, and fill NaN in from its neighbours. At least one value has to be known."""
        places = tuple(np.log(np.asarray(ticks, np.float64)) for ticks in axes.values())
        return cls(axes=axes, steps=in_steps(completed(logarithms, places), STEP))

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


def in_steps(values: NDArray[np.float64], step: float) -> NDArray[np.int16]:
    """Return numbers as multiples of `step`."""
    return np.round(values / step).clip(-32768, 32767).astype(np.int16)


def packed(tables: Sequence[NDArray[np.int16]]) -> str:
    """Compress tables into text: the differences along each one's first axis, two bytes each; zlib, base85."""
    numbers = np.concatenate([np.diff(table, axis=0, prepend=np.int16(0)).ravel() for table in tables])
    # The high bytes, which are nearly all alike, compress best together.
    octets = np.ascontiguousarray(numbers, "<i2").view(np.uint8).reshape(-1, 2).T.tobytes()
    return base64.b85encode(zlib.compress(octets, 9)).decode()


def unpacked(text: str, shapes: Sequence[Sequence[int]]) -> list[NDArray[np.int16]]:
    """Return the tables of these shapes that `packed` packed. Raises ValueError for another text, and for tables of other sizes."""
    try:
        octets = zlib.decompress(base64.b85decode(text))
    except zlib.error as error:
        raise ValueError(f"packed numbers are damaged: {error}") from None
    sizes = [math.prod(shape) for shape in shapes]
    if len(octets) != 2 * sum(sizes):
        raise ValueError(f"packed numbers have {len(octets):,} bytes; their axes want {2 * sum(sizes):,}")
    numbers = np.ascontiguousarray(np.frombuffer(octets, np.uint8).reshape(2, -1).T).view("<i2").ravel()
    tables = np.split(numbers, np.cumsum(sizes)[:-1])
    return [np.cumsum(each.reshape(shape), axis=0, dtype=np.int16) for each, shape in zip(tables, shapes)]


class PackedGrids(msgspec.Struct, frozen=True, kw_only=True):
    """All grids of a file: `ticks`, the values of axes, and by grid and axis the index of its ticks. Logarithms are multiples of `step`. Files
    of earlier versions also say which cells were measured, which nothing reads."""

    ticks: list[list[int]]
    axes: dict[str, dict[str, int]]
    steps: str
    step: float = STEP

    def __post_init__(self) -> None:
        if self.step != STEP:
            raise ValueError(f"step is {self.step}; this paged reads {STEP}")
        for ticks in self.ticks:
            if not ticks or ticks[0] < 1 or any(second <= first for first, second in pairwise(ticks)):
                raise ValueError(f"ticks has {ticks}; its values have to rise, and the first to be above 0")
        for key, axes in self.axes.items():
            for name, place in axes.items():
                if not 0 <= place < len(self.ticks):
                    raise ValueError(f"axes has {place} as {name} of {key}; there are {len(self.ticks)} ticks")
        self._unpacked()

    @classmethod
    def of(cls, grids: Mapping[str, Grid]) -> "PackedGrids":
        """Pack at least one grid."""
        ticks: list[list[int]] = []
        axes: dict[str, dict[str, int]] = {}
        for key, grid in grids.items():
            ticks += [values for values in grid.axes.values() if values not in ticks]
            axes[key] = {name: ticks.index(values) for name, values in grid.axes.items()}
        return cls(ticks=ticks, axes=axes, steps=packed([grid.steps for grid in grids.values()]))

    def grids(self) -> dict[str, Grid]:
        """Return the grids by their keys."""
        axes = [{name: self.ticks[place] for name, place in places.items()} for places in self.axes.values()]
        return {key: Grid(axes=its, steps=steps) for key, its, steps in zip(self.axes, axes, self._unpacked())}

    def _unpacked(self) -> list[NDArray[np.int16]]:
        return unpacked(self.steps, [[len(self.ticks[place]) for place in its.values()] for its in self.axes.values()])


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
