"""What callers pass as numbers: checked once at the door, and Python's own from there on."""

from __future__ import annotations

import math
from typing import Any

from paged.base.arguments import is_integer, is_real
from paged.errors import InvalidRequest

# A count above it is no limit at all. Token counts can be added to it in int64.
UNLIMITED = 2**62


def is_number(value: object) -> bool:
    """Whether the value is a number of Python's, no bool, that a float holds; infinity is one, NaN is none."""
    return isinstance(value, (int, float)) and is_real(value)


def count_of(value: Any) -> int:
    """An integer as Python's own, at most UNLIMITED: numpy's small ones wrap, and larger ones do not fit int64."""
    return min(int(value), UNLIMITED)


def finite_time(now: Any) -> float:
    """`now` (seconds, any origin) as a number of Python's. Raises InvalidRequest for anything but a finite number."""
    if not is_real(now) or math.isinf(now):
        raise InvalidRequest(f"now has to be a finite number of seconds; got {now!r}.")
    return int(now) if is_integer(now) else float(now)


def latest_time(now: Any, latest: float) -> float:
    """The later of `now` and `latest`, the latest time so far. Raises InvalidRequest for anything but a finite number."""
    if isinstance(now, float) and latest <= now < math.inf:
        return now
    return max(latest, finite_time(now))
