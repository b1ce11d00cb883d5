"""Numbers from callers, checked and converted to Python numbers once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import is_integer, is_real
from paged.errors import InvalidRequest

# A count above it is no limit at all. Token counts can be added to it in int64.
UNLIMITED = 2**62


def is_number(value: object) -> bool:
    """Whether the value is a Python number, no bool, that fits a float. Infinity is a number, NaN is not."""
    return isinstance(value, (int, float)) and is_real(value)


def count_of(value: Any) -> int:
    """Return an integer as a Python int of at most UNLIMITED: numpy integers wrap, larger ones exceed int64."""
    return min(int(value), UNLIMITED)


def vocabulary_error(tokens: NDArray[np.int32], vocabulary_size: int) -> str | None:
    """Return what is wrong if a token id is not below the size; None if all are right."""
    if not len(tokens) or (largest := int(tokens.max())) < vocabulary_size:
        return None
    return f"token id {largest} is outside the vocabulary of {vocabulary_size}."


def finite_time(now: Any) -> float:
    """Return `now` (seconds, any origin) as a Python number. Raises InvalidRequest unless it is finite."""
    if isinstance(now, float) and -math.inf < now < math.inf:
        return now
    if not is_real(now) or math.isinf(now):
        raise InvalidRequest(f"now has to be a finite number of seconds; got {now!r}.")
    return int(now) if is_integer(now) else float(now)


def latest_time(now: Any, latest: float) -> float:
    """Return the later of `now` and `latest`. Raises InvalidRequest unless `now` is a finite number."""
    if isinstance(now, float) and latest <= now < math.inf:
        return now
    return max(latest, finite_time(now))
