"""What callers pass as numbers: checked once at the door, and Python's own from there on.

Knows integers of any kind and times. Does not know requests, limits or what a number is for.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np

from scheduler.errors import InvalidRequest

# A count above it is no limit at all. Token counts can be added to it in int64.
UNLIMITED = 2**62


def is_int(value: object) -> TypeGuard[int]:
    """Whether the value is an integer of Python's or numpy's, and no bool."""
    return type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def is_number(value: object) -> bool:
    """Whether the value is a number of Python's, no bool, that a float holds; infinity is one, NaN is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def count_of(value: Any) -> int:
    """An integer as Python's own, at most UNLIMITED: numpy's small ones wrap, and larger ones do not fit int64."""
    return min(int(value), UNLIMITED)


def finite_time(now: Any) -> float:
    """`now` (seconds, any origin) as a number of Python's. Raises InvalidRequest for anything but a finite number."""
    is_number = isinstance(now, (int, float, np.integer, np.floating)) and not isinstance(now, bool)
    try:
        if is_number and math.isfinite(now):
            return int(now) if isinstance(now, (int, np.integer)) else float(now)
    except OverflowError:
        pass
    raise InvalidRequest(f"now has to be a finite number of seconds; got {now!r}.")


def latest_time(now: Any, latest: float) -> float:
    """The later of `now` and `latest`, the latest time so far. Raises InvalidRequest for anything but a finite number."""
    if isinstance(now, float) and latest <= now < math.inf:
        return now
    return max(latest, finite_time(now))
