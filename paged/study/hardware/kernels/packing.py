"""Many numbers as one short text: logarithms in whole steps, two bytes each, compressed.

The steps are the differences along each grid's first axis, int16; all low bytes, then all high ones; zlib, base85.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.study.hardware.kernels.grid import STEP, Grid


def packed(octets: bytes) -> str:
    """Compress bytes into text."""
    return base64.b85encode(zlib.compress(octets, 9)).decode()


def unpacked(text: str) -> bytes:
    """Return the bytes that `packed` compressed. Raises ValueError for another text."""
    try:
        return zlib.decompress(base64.b85decode(text))
    except zlib.error as error:
        raise ValueError(f"packed numbers are damaged: {error}") from None


def packed_numbers(numbers: NDArray[np.int16]) -> str:
    """Pack whole numbers."""
    # The high bytes, which are nearly all alike, compress best together.
    return packed(np.ascontiguousarray(numbers, "<i2").view(np.uint8).reshape(-1, 2).T.tobytes())


def unpacked_numbers(text: str) -> NDArray[np.int16]:
    """Return the numbers that `packed_numbers` packed, int16 [n]. Raises ValueError for another text."""
    octets = np.frombuffer(unpacked(text), np.uint8)
    numbers: NDArray[np.int16] = np.ascontiguousarray(octets.reshape(2, -1).T).view("<i2").ravel()
    return numbers


def packed_steps(values: NDArray[np.float64], step: float) -> str:
    """Pack numbers as multiples of `step`, by their differences along the first axis."""
    steps = np.round(values / step).clip(-32768, 32767).astype(np.int16)
    return packed_numbers(np.diff(steps, axis=0, prepend=np.int16(0)))


def unpacked_steps(text: str, shape: tuple[int, ...], step: float) -> NDArray[np.float64]:
    """Return the numbers that `packed_steps` packed. Raises ValueError for another count."""
    if len(octets := unpacked(text)) != 2 * int(np.prod(shape)):
        raise ValueError(f"values has {len(octets):,} bytes unpacked; its axes want {2 * int(np.prod(shape)):,}")
    deltas = unpacked_numbers(text).reshape(shape)
    values: NDArray[np.float64] = np.cumsum(deltas, axis=0, dtype=np.int16) * np.float64(step)
    return values


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
        found, wanted = len(unpacked(self.steps)), 2 * sum(map(math.prod, map(self._shape, self.axes)))
        if found != wanted:
            raise ValueError(f"steps has {found:,} bytes unpacked; its axes want {wanted:,}")

    @classmethod
    def of(cls, grids: Mapping[str, Grid]) -> PackedGrids:
        """Pack at least one grid."""
        ticks: list[list[int]] = []
        axes: dict[str, dict[str, int]] = {}
        for key, grid in grids.items():
            ticks += [values for values in grid.axes.values() if values not in ticks]
            axes[key] = {name: ticks.index(values) for name, values in grid.axes.items()}
        deltas = [np.diff(grid.steps, axis=0, prepend=np.int16(0)).ravel() for grid in grids.values()]
        return cls(ticks=ticks, axes=axes, steps=packed_numbers(np.concatenate(deltas)))

    def grids(self) -> dict[str, Grid]:
        """Return the grids by their keys."""
        deltas = unpacked_numbers(self.steps)
        found = {}
        start = 0
        for key in self.axes:
            shape = self._shape(key)
            cells = slice(start, start + math.prod(shape))
            found[key] = Grid(
                axes={name: self.ticks[place] for name, place in self.axes[key].items()},
                steps=np.cumsum(deltas[cells].reshape(shape), axis=0, dtype=np.int16),
            )
            start = cells.stop
        return found

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(len(self.ticks[place]) for place in self.axes[key].values())
