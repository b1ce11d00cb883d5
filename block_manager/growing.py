"""Arrays of which only the beginning is ever needed: ones, zeros, 0 1 2 3 and so on.

A step needs such arrays again and again, a little longer now and then. Knows how to make a longer one. Does not know what for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray


class GrowingView:
    """The beginnings of one array, which `make(length)` makes anew when a longer one is asked for."""

    def __init__(self, make: Callable[[int], NDArray[Any]]) -> None:
        self._make = make
        self._array = make(0)

    def first(self, count: int) -> NDArray[Any]:
        """The first `count` entries: a read-only view that costs nothing."""
        if count > len(self._array):
            self._array = self._make(2 * count)
            self._array.flags.writeable = False
        return self._array[:count]
