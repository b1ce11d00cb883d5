"""Conversion of callers' arguments into plain int, bool, float or arrays of integers: done once, nothing wraps later.

The other rooms use these checks, too.
"""

from __future__ import annotations

import math
import sys
from array import array as buffer
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from paged.base.words import shown
from paged.errors import InvalidConfig, InvalidRequest, InvalidTokens

Tokens = NDArray[np.int32]
# The largest count, which means no limit. Token counts can be added to it in int64.
UNLIMITED = 2**62

HIGHEST_LEVEL = 3
MOST_KEPT_AT = 5
_HIGHEST = np.iinfo(np.int64).max
_HIGHEST_TOKEN = np.iinfo(np.int32).max
_INT32 = np.dtype(np.int32)
_FEW = 1024
_HIGHEST_BYTE = 3 if sys.byteorder == "little" else 0


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value is an integer of Python or numpy; a bool is not one."""
    return type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def is_real(value: object) -> bool:
    """Whether the value is a number of Python or numpy that fits a float; a bool and NaN are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def checked_integer(name: str, value: Any, least: int, limit: int | None = None) -> int:
    """Return `value` as an int from `least` to `limit` - 1 (None: no limit). Raises InvalidConfig with `name`."""
    if not is_integer(value):
        raise InvalidConfig(f"{name} has to be an integer; got {shown(value)}.")
    number = int(value)
    if number < least or (limit is not None and number >= limit):
        below = "" if limit is None else f" and below {limit:,}"
        got = f"{number:,}" if abs(number) < 2**64 else shown(number)
        raise InvalidConfig(f"{name} has to be at least {least}{below}; got {got}.")
    return number


def checked_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool. Raises InvalidConfig for all but True and False: "no" and "0" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidConfig(f"{name} has to be True or False; got {shown(value)}.")
    return bool(value)


def checked_level(priority: Any) -> int:
    """Return a priority of content as an int from 1 to HIGHEST_LEVEL. Raises InvalidConfig."""
    if not is_integer(priority) or not 1 <= priority <= HIGHEST_LEVEL:
        raise InvalidConfig(f"priority has to be from 1 to {HIGHEST_LEVEL}; got {shown(priority)}.")
    return int(priority)


def logical_time(name: str, value: Any) -> float:
    """Return `value` as a float. Raises InvalidConfig for NaN, and for whatever is no number that fits a float."""
    if not is_real(value):
        raise InvalidConfig(f"{name} has to be a logical time; got {shown(value)}.")
    return float(value)


def int64_array(values: Any) -> NDArray[np.int64] | None:
    """Return one integer, or a flat sequence of integers, as int64 in the same shape. None for anything else: bools,
    floats, nested or ragged lists, integers beyond int64, and masked arrays, which lack values where they are
    masked."""
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


def token_array(tokens: Any) -> Tokens:
    """Return token ids as int32 [n]: the array itself if it is int32 already, else a copy. Raises InvalidTokens for
    anything that is not a flat sequence of integers from 0 to 2^31 - 1."""
    if type(tokens) is np.ndarray and tokens.dtype == _INT32 and tokens.ndim == 1:
        if not len(tokens) or not _has_negative(tokens):
            return tokens
    elif type(tokens) is list and tokens and type(tokens[0]) is int:
        try:
            # Three times as fast as numpy's conversion; refuses negative numbers, and what is no integer.
            array = np.frombuffer(buffer("I", tokens), np.int32)
        except (OverflowError, TypeError, ValueError):
            pass
        else:
            # Ids above 2^31 - 1 read as negative now.
            if not _has_negative(array):
                return array
    return _converted(tokens)


def tokens_below(tokens: Any, vocabulary_size: int | None) -> Tokens:
    """Return `token_array` of ids below `vocabulary_size` (None: no limit). Raises InvalidTokens."""
    array = token_array(tokens)
    if vocabulary_size is not None and (error := vocabulary_error(array, vocabulary_size)) is not None:
        raise InvalidTokens(error)
    return array


def _converted(tokens: Any) -> Tokens:
    if isinstance(tokens, np.ma.MaskedArray):
        raise InvalidTokens("token ids have to be known; got a masked array, which has no value where it is masked.")
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTokens(_no_token_ids(tokens)) from None
    is_empty = not array.size and not isinstance(tokens, np.ndarray)
    if isinstance(tokens, bytearray) or array.ndim == 0 or (array.dtype.kind not in "iu" and not is_empty):
        raise InvalidTokens(_no_token_ids(tokens))
    if array.size and array.max() > _HIGHEST_TOKEN:
        raise InvalidTokens(f"token id {array.max()} is larger than int32 holds.")
    if array.size and array.min() < 0:
        raise InvalidTokens(f"token id {array.min()} is negative.")
    if array.ndim != 1:
        raise InvalidTokens(f"token ids have to be one flat sequence; got {array.ndim} dimensions.")
    return array.astype(np.int32)


def _no_token_ids(given: Any) -> str:
    """Return the message for an argument that is no flat sequence of integers."""
    found, among = given, ""
    if isinstance(given, (list, tuple)):
        others = [value for value in given if not is_integer(value)]
        if not others:
            return "token ids have to be below 2^31; got an integer that int64 does not hold."
        found, among = others[0], " among them"
    kind = f"a {type(found).__name__}"
    if isinstance(found, (str, bytes, bytearray)):
        kind, among = "text" if isinstance(found, str) else "bytes", among + "; encode it first"
    elif isinstance(found, np.ndarray) and found.ndim:
        kind = f"an array of {found.dtype}"
    elif found is None or isinstance(found, (bool, int, float, np.generic)):
        kind = str(found)
    return f"token ids have to be a flat sequence of integers; got {kind}{among}."


def _has_negative(tokens: Tokens) -> bool:
    """Whether any of these token ids, int32 [n], n ≥ 1, is negative."""
    if len(tokens) > _FEW:
        return bool(tokens.min() < 0)
    # The highest byte of a token id is below 128; bytes are checked faster than a small array is reduced.
    return not tokens.tobytes()[_HIGHEST_BYTE::4].isascii()


def keep_at_error(keep_at: Any, num_tokens: int) -> str | None:
    """Return what is wrong with the lengths of a prompt at which others may begin; None: nothing."""
    is_few = isinstance(keep_at, (tuple, list)) and len(keep_at) <= MOST_KEPT_AT
    if is_few and all(is_integer(length) and 1 <= length <= num_tokens for length in keep_at):
        return None
    return f"keep_at has to be up to {MOST_KEPT_AT} lengths from 1 to {num_tokens} tokens; got {shown(keep_at)}."


def is_number(value: object) -> bool:
    """Whether the value is a Python number, no bool, that fits a float. Infinity is a number, NaN is not."""
    return isinstance(value, (int, float)) and is_real(value)


def count_of(value: Any) -> int:
    """Return an integer as a Python int of at most UNLIMITED: numpy integers wrap, larger ones exceed int64."""
    return min(int(value), UNLIMITED)


def vocabulary_error(tokens: Tokens, vocabulary_size: int) -> str | None:
    """Return what is wrong if a token id is not below the size; None if all are right."""
    if not len(tokens) or (largest := int(tokens.max())) < vocabulary_size:
        return None
    return f"token id {largest} is outside the vocabulary of {vocabulary_size}."


def finite_time(now: Any) -> float:
    """Return `now` (seconds, any origin) as a Python number. Raises InvalidRequest unless it is finite."""
    if isinstance(now, float) and -math.inf < now < math.inf:
        return now
    if not is_real(now) or math.isinf(now):
        raise InvalidRequest(f"now has to be a finite number of seconds; got {shown(now)}.")
    return int(now) if is_integer(now) else float(now)


def latest_time(now: Any, latest: float) -> float:
    """Return the later of `now` and `latest`. Raises InvalidRequest unless `now` is a finite number."""
    if isinstance(now, float) and latest <= now < math.inf:
        return now
    return max(latest, finite_time(now))
