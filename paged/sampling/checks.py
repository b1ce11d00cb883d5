"""Checks that several kinds of parameters share. Each raises InvalidSampling with the name, what is allowed, and the value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paged.base.arguments import is_integer
from paged.base.words import shown
from paged.errors import InvalidSampling


def must_be(is_right: bool, name: str, what: str, value: object) -> None:
    """Raise InvalidSampling unless `is_right`: the parameter `name` has to be `what`."""
    if not is_right:
        raise InvalidSampling(f"{name} has to be {what}; got {shown(value)}.")


def check_seed(name: str, seed: Any) -> None:
    """Raise InvalidSampling unless it is an unsigned integer of 64 bits."""
    must_be(is_integer(seed) and 0 <= seed < 2**64, name, "an integer from 0 to 2^64 - 1", seed)


def check_max_tokens(max_tokens: Any) -> None:
    """Raise InvalidSampling unless it is an integer of at least 1."""
    must_be(is_integer(max_tokens) and max_tokens >= 1, "max_tokens", "an integer of at least 1", max_tokens)


def check_flag(name: str, value: Any) -> None:
    """Raise InvalidSampling unless it is True or False."""
    must_be(isinstance(value, bool), name, "True or False", value)


def check_stop_ids(stop_token_ids: Any, limit: int) -> None:
    """Raise InvalidSampling unless they are a tuple of token ids below the limit."""
    must_be(isinstance(stop_token_ids, (tuple, list)), "stop_token_ids", "a tuple of token ids", stop_token_ids)
    check_ids("stop_token_ids", stop_token_ids, limit)


def check_ids(name: str, tokens: Iterable[Any], limit: int) -> None:
    """Raise InvalidSampling unless all are token ids below the limit."""
    for token in tokens:
        if not (is_integer(token) and 0 <= token < limit):
            raise InvalidSampling(f"{name} have to be token ids from 0 to {limit - 1:,}; got {shown(token)}.")
