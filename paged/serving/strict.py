"""JSON objects in which no field is ignored, and JSON that is text throughout."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from paged.serving.errors import ApiError, wrong

Number = StrictFloat | StrictInt
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
UNKNOWN, UNSUPPORTED = "unknown_field", "unsupported_field"
Reasons = dict[str, tuple[str, tuple[Any, ...]]]
"""By field: why it is not supported, and the values beside null that ask for nothing."""


class Body(BaseModel):
    """A JSON object without unknown fields. A field in `unsupported` is refused unless it asks for nothing."""

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


_KINDS = {"str", "int", "float", "bool", "TextPart", "KvHint", "KvHintsEnvelope"}


def refused(found: Sequence[Any], within: tuple[str, ...] = ()) -> ApiError:
    """Return the error for what pydantic refused, which names the field. `within`: the object of the body that has it."""
    # A field that is refused by name says more than the types that were tried beside it.
    first = next((each for each in found if each["type"] in (UNKNOWN, UNSUPPORTED)), None) or _nearest(found)
    code = first["type"] if first["type"] in (UNKNOWN, UNSUPPORTED) else "invalid_value"
    # Between fields and indices pydantic names the types that it tried.
    named = [str(part) for part in (*within, *first["loc"]) if str(part).isidentifier() or str(part).isdigit()]
    named += [first["ctx"]["field"]] if code != "invalid_value" else []
    place = ".".join(part for part in named if part not in _KINDS)[:200]
    if first["type"] == "json_invalid":
        place, first = "", {"msg": f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}"}
    elif first["type"] in ("model_attributes_type", "missing") and not place:
        first = {"msg": "the body has to be a JSON object, sent with Content-Type: application/json"}
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return wrong(message[:1000], place or None, code)


def _nearest(found: Sequence[Any]) -> Any:
    """Return one error of the first wrong field: that of the type that its value is nearest to."""
    tried = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    nearest = max(tried, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    if nearest["type"] == "string_type" and any(each["type"] == "list_type" for each in tried):
        return {**nearest, "msg": "Input should be a valid string or list"}
    return nearest


# Half of a surrogate pair, escaped or as bytes. Behind an escaped backslash it may be plain text.
_HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\xed[\xa0-\xbf]")


def must_be_text(body: bytes) -> None:
    """Raise ApiError, which names the field, for JSON with half of a surrogate pair in a text or a key: it stands for no character."""
    if _HALF.search(body) is None:
        return
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        # No JSON: pydantic says so.
        return
    for name, value in given.items() if isinstance(given, dict) else [("", given)]:
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            name = name.encode("ascii", "replace").decode()[:100]
            raise wrong(
                f"{name or 'the body'}: half of a surrogate pair is no text.", name or None, "invalid_value"
            ) from None
