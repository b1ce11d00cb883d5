"""What an engine is given, checked and made plain: Python's own numbers, which neither overflow nor wrap.

Knows kinds of values and their limits. Does not know what they are for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from block_manager import InvalidConfig, InvalidTokens, token_array
from scheduler import InvalidRequest


def checked_size(name: str, value: Any, least: int = 1) -> int:
    """The integer as an int. Raises InvalidConfig, calling it `name`, for anything else, bool among it, and below
    `least`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidConfig(f"{name} has to be an integer; got {value!r}.")
    if value < least:
        raise InvalidConfig(f"{name} has to be at least {least}; got {value}.")
    return int(value)


def checked_limit(name: str, value: Any, least: int = 1) -> int | None:
    """As `checked_size`; None stays None."""
    return None if value is None else checked_size(name, value, least)


def checked_flag(name: str, value: Any) -> bool:
    """True or False. Raises InvalidConfig, calling it `name`, for anything else."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidConfig(f"{name} has to be True or False; got {value!r}.")
    return bool(value)


def checked_time(name: str, value: Any) -> float:
    """Seconds as a float. Raises InvalidRequest, calling them `name`, for what is no finite number."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        is_finite = is_number and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        is_finite = False
    if not is_finite:
        raise InvalidRequest(f"{name} has to be a finite number of seconds; got {value!r}.")
    return float(value)


def checked_tokens(prompt: Any) -> list[int]:
    """Token ids as a list of int. Raises InvalidRequest for what is no flat sequence of integers from 0 to 2^31 - 1."""
    if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__iter__"):
        raise InvalidRequest(f"a prompt has to be text, or a sequence of token ids; got {prompt!r}.")
    if isinstance(prompt, np.ma.MaskedArray):
        raise InvalidRequest("a prompt cannot be a masked array; its masked values are no tokens.")
    ids = prompt if isinstance(prompt, (np.ndarray, list)) else list(prompt)
    # numpy takes a bool among integers for an integer.
    if isinstance(ids, list) and any(type(token) is bool for token in ids):
        raise InvalidRequest("token ids have to be integers; got bool.")
    try:
        found: list[int] = token_array(ids).tolist()
    except InvalidTokens as error:
        raise InvalidRequest(f"prompt: {error}") from None
    return found
