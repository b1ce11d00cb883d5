"""A function of a few sizes, tabulated: logarithms on a grid, read by interpolation, and packed small.

Knows axes and numbers. Does not know kernels or devices.
"""

from __future__ import annotations

import base64
import zlib
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged.hardware.kernels.completion import completed

STEP = 0.02
"""Logarithms are kept as multiples of it: a value is off by 1 % at most for that, by half a percent in the median."""


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, eq=False):
    """Logarithms at each combination of the axes' values, interpolated between them over the axes' logarithms.

    axes      each axis' values, ascending, by its name
    values    the logarithms, packed
    measured  which of them come from a measurement and not from their neighbours, packed bits
    """

    axes: dict[str, list[int]]
    values: str
    measured: str

    def __post_init__(self) -> None:
        for name, ticks in self.axes.items():
            if not ticks or ticks[0] < 1 or any(second <= first for first, second in zip(ticks, ticks[1:])):
                raise ValueError(f"axes has {name} {ticks}; its values have to rise, and the first to be above 0")
        for field, found, wanted in (
            ("values", len(_unpacked(self.values)), 2 * self.num_cells),
            ("measured", len(_unpacked(self.measured)), -(-self.num_cells // 8)),
        ):
            if found != wanted:
                raise ValueError(f"{field} has {found:,} bytes unpacked; its axes want {wanted:,}")

    @classmethod
    def of(cls, logarithms: NDArray[np.float64], axes: dict[str, list[int]]) -> Grid:
        """A grid of what is not NaN; what is, is filled from its neighbours. At least one has to be known."""
        places = tuple(np.log(np.asarray(ticks, np.float64)) for ticks in axes.values())
        steps = np.round(completed(logarithms, places) / STEP).clip(-32768, 32767).astype(np.int16)
        deltas = np.diff(steps, axis=0, prepend=np.int16(0))
        # All low bytes, then all high ones, which are nearly all alike.
        octets = np.ascontiguousarray(deltas, "<i2").view(np.uint8).reshape(-1, 2).T
        return cls(axes=axes, values=_packed(octets.tobytes()), measured=_packed(np.packbits(~np.isnan(logarithms)).tobytes()))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(ticks) for ticks in self.axes.values())

    @property
    def num_cells(self) -> int:
        return int(np.prod(self.shape))

    @cached_property
    def logarithms(self) -> NDArray[np.float64]:
        """All of them, filled, of `shape`."""
        octets = np.frombuffer(_unpacked(self.values), np.uint8).reshape(2, -1).T
        deltas = np.ascontiguousarray(octets).view("<i2").reshape(self.shape)
        return np.cumsum(deltas, axis=0, dtype=np.int16) * STEP

    @cached_property
    def is_measured(self) -> NDArray[np.bool_]:
        """Of each, whether it comes from a measurement."""
        bits = np.unpackbits(np.frombuffer(_unpacked(self.measured), np.uint8), count=self.num_cells)
        return bits.astype(np.bool_).reshape(self.shape)

    def at(self, *sizes: ArrayLike) -> NDArray[np.float64]:
        """The logarithm at these sizes, one for each axis, broadcast; outside of an axis that of its edge."""
        return self._read(self.logarithms, sizes)

    def measured_share(self, *sizes: ArrayLike) -> NDArray[np.float64]:
        """How much of the answer at these sizes is interpolated from measured cells, 0 to 1."""
        return self._read(self.is_measured.astype(np.float64), sizes)

    def beyond(self, *sizes: ArrayLike) -> dict[str, float]:
        """By axis, how many times a size is above its last value, or below its first; axes that hold all sizes are left out."""
        found = {}
        for (name, ticks), size in zip(self.axes.items(), sizes):
            asked = np.asarray(size, np.float64)
            factor = float(np.max(np.maximum(asked / ticks[-1], ticks[0] / asked)))
            if factor > 1:
                found[name] = factor
        return found

    def _read(self, table: NDArray[np.float64], sizes: tuple[ArrayLike, ...]) -> NDArray[np.float64]:
        asked = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        corners: list[tuple[list[Any], Any]] = [([], 1.0)]
        for place, ticks in zip(asked, self._places):
            position = np.interp(np.log(place), ticks, np.arange(len(ticks)))
            low = np.minimum(position.astype(np.intp), max(len(ticks) - 2, 0))
            high = np.minimum(low + 1, len(ticks) - 1)
            share = position - low
            corners = [
                ([*index, end], weight * part) for index, weight in corners for end, part in ((low, 1 - share), (high, share))
            ]
        total = np.zeros(asked[0].shape)
        for index, weight in corners:
            total = total + weight * table[tuple(index)]
        return total

    @cached_property
    def _places(self) -> list[NDArray[np.float64]]:
        return [np.log(np.asarray(ticks, np.float64)) for ticks in self.axes.values()]


def _packed(octets: bytes) -> str:
    return base64.b64encode(zlib.compress(octets, 9)).decode()


def _unpacked(text: str) -> bytes:
    """Raises ValueError for what was not packed here."""
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"packed numbers are damaged: {error}") from None
