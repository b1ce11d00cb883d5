"""What enters the memory layer becomes a plain int, bool, float or int64 array here, once, so that nothing wraps later.

Knows kinds and ranges of numbers. Does not know rows, blocks or what a number is for.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from paged.block_manager.errors import InvalidConfig

_HIGHEST = np.iinfo(np.int64).max


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value is an integer of Python or numpy; a bool is not."""
    return type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def is_real(value: object) -> bool:
    """Whether the value is a number of Python or numpy that a float holds; a bool and NaN are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def checked_integer(name: str, value: Any, least: int, limit: int | None = None) -> int:
    """`value` as an int from `least` to `limit` - 1 (None: no limit). Raises InvalidConfig, which begins with `name`."""
    if not is_integer(value):
        raise InvalidConfig(f"{name} has to be an integer; got {value!r}.")
    number = int(value)
    if number < least or (limit is not None and number >= limit):
        below = "" if limit is None else f" and below {limit:,}"
        raise InvalidConfig(f"{name} has to be at least {least}{below}; got {number:,}.")
    return number


def checked_flag(name: str, value: Any) -> bool:
    """`value` as a bool. Raises InvalidConfig for all but True and False, because "no" and "0" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidConfig(f"{name} has to be True or False; got {value!r}.")
    return bool(value)


def logical_time(name: str, value: Any) -> float:
    """`value` as a float. Raises InvalidConfig for what is no number, for NaN, and for an integer that no float holds."""
    if not is_real(value):
        raise InvalidConfig(f"{name} has to be a logical time; got {value!r}.")
    return float(value)


def int64_array(values: Any) -> NDArray[np.int64] | None:
    """One integer, or a flat sequence of integers, as int64 of the same shape; None for anything else.

    Anything else: bools, floats, nested or ragged lists, integers that int64 does not hold, and masked arrays, which
    have no value where they are masked.
    """
    if isinstance(values, np.ma.MaskedArray) or (isinstance(values, (list, tuple)) and bool in map(type, values)):
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        return None
    if array.dtype == np.uint64 and array.size and array.max() > _HIGHEST:
        return None
    return array.astype(np.int64)
