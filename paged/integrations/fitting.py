"""Whether an engine that is installed has the names, and the fields, that a plug-in uses of it.

Engines call the interfaces that we plug into private, and change them between versions. So each plug-in lists what it
uses, a version that has all of it is accepted, and one that has not is refused with what is missing. One that asks a
scheduler for a method that ours does not have is refused with the method. Imports no engine before it is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

Needed = Mapping[str, tuple[str, ...]]
"""By "module:name", what is used of it: fields, members or methods."""


def wrong_with(needed: Needed, made: Collection[str] = ()) -> list[str]:
    """What the engine that is installed lacks, as sentences. Of the names in `made` a plug-in makes objects itself: one that asks for a
    field that is not in the list would fail at the first step."""
    return [sentence for name, used in needed.items() for sentence in _wrong_with_one(name, used, made)]


def undefined_in(*ours: type) -> list[str]:
    """What the engine makes abstract and these classes, which derive from its own, do not define, as sentences: none could be made."""
    return [
        f"it asks {one.__name__} for {name}" for one in ours for name in sorted(getattr(one, "__abstractmethods__", ()))
    ]


def does_not_fit(engine: str, wrong: Collection[str], tried: Collection[str]) -> str:
    """What a plug-in says of an engine, named with its version, that `wrong_with` or `undefined_in` found something wrong with."""
    return f"{engine} does not fit: {'; '.join(wrong)}. Tried versions: {', '.join(tried)}. Another version of paged may fit."


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
    """The fields of a dataclass, a msgspec struct or a named tuple, and whether each has to be given."""
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
