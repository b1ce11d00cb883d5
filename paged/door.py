"""What an engine is given, checked and made plain: Python's own numbers, which neither overflow nor wrap.

Knows kinds of values and their limits. Does not know what they are for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paged.block_manager import InvalidTokens
from paged.block_manager.arguments import checked_integer, is_real, token_array
from paged.scheduler import InvalidRequest


def checked_limit(name: str, value: Any, least: int = 1) -> int | None:
    """As `checked_integer`; None stays None."""
    return None if value is None else checked_integer(name, value, least)


def checked_time(name: str, value: Any) -> float:
    """Seconds as a float. Raises InvalidRequest, calling them `name`, for what is no finite number."""
    if not is_real(value) or math.isinf(value):
        raise InvalidRequest(f"{name} has to be a finite number of seconds; got {value!r}.")
    return float(value)


def checked_tokens(prompt: Any) -> list[int]:
    """Token ids as a list of int. Raises InvalidRequest for what is no flat sequence of integers from 0 to 2^31 - 1."""
    if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__iter__"):
        raise InvalidRequest(f"a prompt has to be text, or a sequence of token ids; got {prompt!r}.")
    ids = prompt if isinstance(prompt, (np.ndarray, list)) else list(prompt)
    # numpy takes a bool among integers for an integer.
    if isinstance(ids, list) and any(type(token) is bool for token in ids):
        raise InvalidRequest("token ids have to be integers; got bool.")
    try:
        found: list[int] = token_array(ids).tolist()
    except InvalidTokens as error:
        raise InvalidRequest(f"prompt: {error}") from None
    return found
