"""Checks that an installed engine has the names and fields that a plug-in uses.

The interfaces that we plug into are private, and change between versions. So each plug-in lists what it uses. A version that
has all of it is accepted; another one is refused with the names that are missing, or with the abstract methods that our
scheduler does not define. Imports an engine only on a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

Needed = Mapping[str, tuple[str, ...]]
"""By "module:name", the fields, members or methods that are used."""


def wrong_with(needed: Needed, made: Collection[str] = ()) -> list[str]:
    """Return what the installed engine lacks, as sentences. A plug-in makes objects of the names in `made`: one with a required field that is not in
    the list would fail at the first step."""
    return [sentence for name, used in needed.items() for sentence in _wrong_with_one(name, used, made)]


def undefined_in(*ours: type) -> list[str]:
    """Return the engine's abstract methods that these classes, which derive from its own, do not define, as sentences."""
    return [
        f"it asks {one.__name__} for {name}" for one in ours for name in sorted(getattr(one, "__abstractmethods__", ()))
    ]


def must_fit(wrong: Collection[str], refusal: type[Exception], engine: str, tried: Collection[str]) -> None:
    """Raise `refusal` for an engine, named with its version, in which `wrong_with` or `undefined_in` found something wrong."""
    if wrong:
        raise refusal(
            f"{engine} does not fit: {'; '.join(wrong)}. Tried versions: {', '.join(tried)}. Another version of paged may fit."
        )


def _wrong_with_one(name: str, used: tuple[str, ...], made: Collection[str]) -> list[str]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError):
        return [f"it has no {module}.{attribute}"]
    known = fields_of(found)
    lacking = [field for field in used if field not in known and not hasattr(found, field)]
    sentences = [f"{attribute} has no {field}" for field in lacking]
    if attribute in made:
        sentences += [
            f"{attribute} asks for {field}" for field, is_needed in known.items() if is_needed and field not in used
        ]
    return sentences


def fields_of(found: Any) -> dict[str, bool]:
    """Return the fields of a dataclass, a msgspec struct or a named tuple, and whether each is required."""
    if is_dataclass(found):
        return {
            field.name: field.default is MISSING and field.default_factory is MISSING
            for field in fields(found)
            if field.init
        }
    if hasattr(found, "__struct_fields__"):
        num_needed = len(found.__struct_fields__) - len(found.__struct_defaults__)
        return {field: place < num_needed for place, field in enumerate(found.__struct_fields__)}
    if hasattr(found, "_fields"):
        return {field: field not in found._field_defaults for field in found._fields}
    return {}
