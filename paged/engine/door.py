"""Checks of an engine's arguments. They return Python's own numbers, which neither overflow nor wrap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged.base.arguments import is_integer, is_real, token_array
from paged.base.words import shown
from paged.errors import InvalidRequest, InvalidTokens


def checked_time(name: str, value: Any) -> float:
    """Return seconds as a float. Raises InvalidRequest, with `name`, unless the value is a finite number."""
    if not is_real(value) or math.isinf(value):
        raise InvalidRequest(f"{name} has to be a finite number of seconds; got {shown(value)}.")
    return float(value)


def checked_text(prompt: str) -> str:
    """Return the text. Raises InvalidRequest if it has a lone surrogate, which stands for no character."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"character {error.start} of the prompt is {prompt[error.start]!a}, half of a surrogate pair; that is no text."
        ) from None
    return prompt


def checked_tokens(prompt: Any) -> list[int]:
    """Return token ids as a list of int. Raises InvalidRequest for anything but a flat sequence of integers from 0 to 2^31 - 1."""
    if isinstance(prompt, Mapping) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)):
        raise InvalidRequest(
            f"a prompt has to be text, or a sequence of token ids; got {shown(prompt)}. "
            f"Chat messages become text by the tokenizer's apply_chat_template."
        )
    if isinstance(prompt, (bytes, bytearray, set, frozenset)) or not hasattr(prompt, "__iter__"):
        raise InvalidRequest(f"a prompt has to be text, or a sequence of token ids; got {shown(prompt)}.")
    ids = prompt if isinstance(prompt, (np.ndarray, list)) else list(prompt)
    # numpy takes a bool among integers for an integer.
    if isinstance(ids, list) and set(map(type, ids)) - {int}:
        for token in ids:
            if not is_integer(token):
                raise InvalidRequest(f"token ids have to be integers; got {shown(token)}.")
    try:
        found: list[int] = token_array(ids).tolist()
    except InvalidTokens as error:
        raise InvalidRequest(f"prompt: {error}") from None
    return found
