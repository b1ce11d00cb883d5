"""The limits of numbers that callers and files give."""

import math
import sys
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from paged.base.fields import Finite, checked_fields, converted

MAX_TOKENS = 10_000_000
"""More than any model reads. A longer request is a damaged file."""
MAX_PRIORITY = 2**31 - 1
MAX_SHARED_IDS = 2**30
"""Ids of shared content are below it. From it on, content ids belong to a single request."""
MAX_NAME = 100
"""Characters of a name. A longer one is a damaged file."""

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Id = Annotated[int, Meta(ge=0, lt=MAX_SHARED_IDS)]
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(gt=0, le=1)]


def is_name(text: str) -> bool:
    """Whether a text can be a name: short, printable, and without space around it."""
    return text.isprintable() and text == text.strip() and len(text) <= MAX_NAME


def at_least(what: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value` as an int. Raises InvalidConfig unless it is a whole number from `least` to `most`."""
    return int(converted(what, value, Annotated[int, Meta(ge=least, le=most)]))


def between(what: str, value: float, least: float, most: float) -> float:
    """Return `value` as a float. Raises InvalidConfig unless it is a number from `least` to `most`."""
    return float(converted(what, value, Annotated[float, Meta(ge=least, le=most if most < math.inf else None)]))


def positive(what: str, value: float) -> float:
    """Return `value` as a float. Raises InvalidConfig unless it is a finite number above 0."""
    return float(converted(what, value, Finite))


def check(struct: msgspec.Struct) -> None:
    """Raise InvalidConfig for a field that is not as its annotation says."""
    checked_fields(type(struct), {name: getattr(struct, name) for name in struct.__struct_fields__})


def generators(seed: int, count: int) -> list[np.random.Generator]:
    """Return independent generators of one seed: draws from one do not change the others. Raises InvalidConfig below 0."""
    return np.random.default_rng(at_least("seed", seed, 0)).spawn(count)
