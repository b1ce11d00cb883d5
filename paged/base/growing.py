"""Arrays that steps need again and again, sometimes longer: ones, rising numbers, packed runs of them, and tables.

A longer one has twice the length, so that it is rarely made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", bound=np.generic)


class GrowingView:
    """Views of the beginning of one array. `make(length)` makes a longer array when a longer view is asked for."""

    def __init__(self, make: Callable[[int], NDArray[Any]]) -> None:
        self._make = make
        self._array = make(0)

    def first(self, count: int) -> NDArray[Any]:
        """Return the first `count` entries: a read-only view that costs nothing."""
        array = self._array
        if count > len(array):
            array = self._make(2 * count)
            array.flags.writeable = False
            # Another thread may have set one meanwhile, longer or shorter: this view is of its own.
            self._array = array
        return array[:count]


ones: Callable[[int], NDArray[np.int64]] = GrowingView(lambda length: np.ones(length, np.int64)).first
"""int64 [count] of 1, a read-only view that the whole process shares."""
rising: Callable[[int], NDArray[np.int64]] = GrowingView(np.arange).first
"""int64 [count] of 0, 1, 2 and so on, a read-only view that the whole process shares."""


def rounded_up(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def rising_from(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [counts.sum()], packed: firsts[i], firsts[i] + 1 and so on, counts[i] of them."""
    before = counts.cumsum()
    before -= counts
    found: NDArray[np.int64] = (firsts - before).repeat(counts)
    found += rising(len(found))
    return found


def with_room(table: NDArray[_Number], num_rows: int, num_columns: int, fill: int = 0) -> NDArray[_Number]:
    """Return the table, [rows, columns, ...], or a copy that has room for so many, by doubling, filled with `fill`."""
    have = table.shape[:2]
    if num_rows <= have[0] and num_columns <= have[1]:
        return table
    rows, columns = (
        old if new <= old else max(2 * old, new) for old, new in zip(have, (num_rows, num_columns), strict=True)
    )
    grown = np.full((rows, columns, *table.shape[2:]), fill, table.dtype)
    grown[: have[0], : have[1]] = table
    return grown
