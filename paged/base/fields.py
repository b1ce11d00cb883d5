"""Checks of callers' values by the types and limits in a struct's annotations. No part of block_manager imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, inspect

from paged.base.arguments import HIGHEST_LEVEL, count_of
from paged.base.words import shown
from paged.errors import InvalidConfig

Name = Annotated[str, Meta(min_length=1)]
AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Level = Annotated[int, Meta(ge=1, le=HIGHEST_LEVEL)]
Finite = Annotated[float, Meta(gt=0, le=sys.float_info.max)]

_KINDS = {
    "Int": "an integer",
    "Float": "a number",
    "Bool": "True or False",
    "None": "None",
    "Str": "a string",
    "Custom": "a function",
    "Any": "anything",
}
_LIMITS = {"ge": "of at least", "gt": "above", "le": "up to", "lt": "below", "min_length": "of length at least"}


def converted(name: str, value: Any, hint: Any, error: Callable[[str], Exception] = InvalidConfig) -> Any:
    """Return a value in the type of `hint`: numpy's numbers become Python's, and integers are at most UNLIMITED. Raises
    `error` with the field, the value and the limit."""
    own = _plain(value)
    if isinstance(value, (tuple, list)):
        own = [*map(_plain, value)]
    elif isinstance(value, Mapping):
        own = {key: _plain(each) for key, each in value.items()}
    try:
        found = value if hint is Any else msgspec.convert(own, hint)
    except (msgspec.ValidationError, UnicodeEncodeError):
        # The latter: half of a surrogate pair.
        raise error(f"{name} has to be {in_words(inspect.type_info(hint))}; got {shown(value)}.") from None
    return count_of(found) if type(found) is int else found


def checked_fields(
    kind: type[msgspec.Struct], values: Mapping[str, Any], error: Callable[[str], Exception] = InvalidConfig
) -> dict[str, Any]:
    """Return the values of a struct's fields after `converted`. Raises `error` for the first one that is wrong."""
    return {name: converted(name, values[name], hint, error) for name, hint in _hints_of(kind).items()}


@cache
def _hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def in_words(info: Any) -> str:
    """Return in words what a type takes."""
    kind = type(info).__name__.removesuffix("Type")
    if kind == "Union":
        return ", or ".join(map(in_words, info.types))
    if kind == "Literal":
        return f"one of {', '.join(info.values)}"
    if kind == "Tuple":
        return f"a tuple: {', '.join(map(in_words, info.item_types))}"
    if kind in ("VarTuple", "List"):
        least = f" of at least {info.min_length}" if info.min_length else ""
        return f"a {'list' if kind == 'List' else 'tuple'}{least}, each {in_words(info.item_type)}"
    if kind == "Dict":
        return f"a mapping from {in_words(info.key_type)} to {in_words(info.value_type)}"
    found = [(words, getattr(info, field, None)) for field, words in _LIMITS.items()]
    unlimited = (None, sys.float_info.max, -sys.float_info.max)
    limits = [f"{words} {limit:,}".removesuffix(".0") for words, limit in found if limit not in unlimited]
    is_finite = getattr(info, "le", None) == sys.float_info.max
    what = "a finite number" if is_finite else _KINDS.get(kind) or f"a {getattr(info, 'cls', type(info)).__name__}"
    return f"{what} {' and '.join(limits)}".rstrip()
