"""JSON objects in which no field is ignored, and JSON that is text throughout."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from paged.serving.errors import wrong

UNKNOWN, UNSUPPORTED = "unknown_field", "unsupported_field"
Reasons = dict[str, tuple[str, tuple[Any, ...]]]
"""By field: why it is not supported, and the values that ask for nothing, beside null."""


class Body(BaseModel):
    """A JSON object without unknown fields. `unsupported` are fields that are refused unless they ask for nothing."""

    model_config = ConfigDict(extra="forbid")
    unsupported: ClassVar[Reasons] = {}

    @model_validator(mode="before")
    @classmethod
    def _all_is_known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in given.items():
            why, neutral = cls.unsupported.get(name, ("", ()))
            if why and value is not None and value not in neutral:
                usual = "".join(f" or {json.dumps(each)}" for each in neutral[:1])
                why = f"not supported: {why.removesuffix('.')}. Leave it out, or send null{usual}."
                raise PydanticCustomError(UNSUPPORTED, "{why}", {"why": why, "field": name})
            if not why and name not in known:
                close = get_close_matches(name[:64], known, 1, 0.7)
                why = "there is no such field." + (f" Did you mean {close[0]}?" if close else "")
                raise PydanticCustomError(UNKNOWN, "{why}", {"why": why, "field": name[:100]})
        return {name: value for name, value in given.items() if name in known}


# Half of a surrogate pair, as JSON escapes it or as bytes; an escaped backslash before it may make it none.
_HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\xed[\xa0-\xbf]")


def must_be_text(body: bytes) -> None:
    """Raise ApiError, naming the field, for JSON with half of a surrogate pair, which stands for no character, in a text or a key."""
    if _HALF.search(body) is None:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        # It is no JSON: its reader says so.
        return
    for name, value in given.items() if isinstance(given, dict) else [("", given)]:
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            name = name.encode("ascii", "replace").decode()[:100]
            raise wrong(
                f"{name or 'the body'}: half of a surrogate pair is no text.", name or None, "invalid_value"
            ) from None
