"""Lines of numbers by lane; those of a whole batch are picked at once.

lane 0: | 7 2.5 |            pick([3, 0]) → owners | 0 0 1 |,  columns | 4 9 7 |  | 0.1 0.2 2.5 |
lane 3: | 4 0.1 | 9 0.2 |
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

Columns = tuple[NDArray[Any], ...]
NOTHING = -1
"""Fills up the shorter lines of a matrix."""


class Lines:
    """Lines of several columns, by lane. A column is an array, or a matrix of any width. Lines are packed when they are read, since lanes change seldom."""

    def __init__(self) -> None:
        self._by_lane: dict[int, Columns] = {}
        self._packed: tuple[NDArray[np.int64], NDArray[np.int64], Columns] | None = None

    def set(self, lane: int, *columns: NDArray[Any]) -> None:
        """Set the lines of a lane."""
        if len(columns[0]):
            self._by_lane[lane] = columns
            self._packed = None

    def drop(self, lane: int) -> None:
        """Remove the lines of a lane."""
        if self._by_lane.pop(lane, None) is not None:
            self._packed = None

    def pick(self, lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], Columns] | None:
        """Return the k lines of these lanes: the place among `lanes` of each line's lane, int64 [k], and the columns, [k] each; None if k is 0."""
        if not self._by_lane:
            return None
        first, count, columns = self._packing()
        its = np.where(lanes < len(count), lanes, 0)
        counts = np.where(lanes < len(count), count[its], 0)
        if not counts.any():
            return None
        index = rising_from(first[its], counts)
        return np.arange(len(lanes)).repeat(counts), tuple(column[index] for column in columns)

    def _packing(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Columns]:
        """Return by lane the first of its lines, and their number; and the columns of all lines."""
        if self._packed is None:
            lanes = sorted(self._by_lane)
            count = np.zeros(lanes[-1] + 1, np.int64)
            count[lanes] = [len(self._by_lane[lane][0]) for lane in lanes]
            several = zip(*(self._by_lane[lane] for lane in lanes), strict=True)
            self._packed = count.cumsum() - count, count, tuple(_stacked(parts) for parts in several)
        return self._packed


def _stacked(parts: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    """Return all lines of a column; a matrix is as wide as the widest part."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=NOTHING) for part in parts]
    )
