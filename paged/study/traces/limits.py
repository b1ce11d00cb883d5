"""The limits of a trace's numbers, for files, transformations and generators."""

import math
from collections.abc import Callable

import numpy as np

from paged.base.arguments import is_integer, is_real
from paged.base.words import shown
from paged.errors import InvalidConfig

MAX_TOKENS = 10_000_000
"""More than any model reads. A longer request is a damaged file."""
MAX_PRIORITY = 2**31 - 1
MAX_NAME = 100
"""Characters of a name. A longer one is a damaged file."""


def is_name(text: str) -> bool:
    """Whether a text can be a name: short, printable, and without space around it."""
    return text.isprintable() and text == text.strip() and len(text) <= MAX_NAME


def at_least(what: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value` as an int. Raises InvalidConfig unless it is a whole number from `least` to `most`."""
    if not is_integer(value):
        raise InvalidConfig(f"{what} is {shown(value)}; it must be a whole number")
    if value < least:
        raise InvalidConfig(f"{what} is {value:,}; at least {least:,} is needed")
    if most is not None and value > most:
        raise InvalidConfig(f"{what} is {value:,}; at most {most:,} is possible")
    return int(value)


def positive(what: str, value: float) -> float:
    """Return `value` as a float. Raises InvalidConfig unless it is a finite number above 0."""
    return _real(what, value, lambda: math.isfinite(value) and value > 0, "a positive number")


def between(what: str, value: float, least: float, most: float) -> float:
    """Return `value` as a float. Raises InvalidConfig unless it is a number from `least` to `most`."""
    return _real(what, value, lambda: least <= value <= most, f"a number from {least:,g} to {most:,g}")


def generators(seed: int, count: int) -> list[np.random.Generator]:
    """Return independent generators of one seed: draws from one do not change the others. Raises InvalidConfig below 0."""
    return np.random.default_rng(at_least("seed", seed, 0)).spawn(count)


def _real(what: str, value: float, is_right: Callable[[], bool], wanted: str) -> float:
    if not is_real(value) or not is_right():
        raise InvalidConfig(f"{what} is {f'{value:g}' if is_real(value) else shown(value)}; it must be {wanted}")
    return float(value)
