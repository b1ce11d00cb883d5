"""The form of an answer: the parameters of structured outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from paged.base.words import shown
from paged.errors import InvalidSampling
from paged.sampling.checks import check_flag, must_be

MAX_CHARS = 262_144
"""Most characters of a schema, an expression, a grammar, or all choices together."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer, by exactly one of the first five fields. Raises InvalidSampling. Names are vLLM's.

    json         a JSON schema, as text or as a mapping: the answer is a JSON document that the schema describes
    json_object  any JSON object
    regex        a regular expression of the whole answer, in Rust's syntax without look-around
    choice       texts, one of which is the answer
    grammar      a grammar in Lark's syntax, as llguidance reads it
    disable_any_whitespace
                 JSON has no optional white space; with it, small models may write white space until max_tokens
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            check_flag(name, getattr(self, name))
        named = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        named += ["json_object"] if self.json_object else []
        if len(named) != 1:
            what = " and ".join(named) or "none"
            raise InvalidSampling(
                f"exactly one of json, json_object, regex, choice and grammar describes an answer; got {what}."
            )
        if self.json is not None:
            _check_schema(self.json)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        if self.choice is not None:
            is_some = isinstance(self.choice, (tuple, list)) and bool(self.choice)
            must_be(is_some, "choice", "a tuple of texts, at least one", self.choice)
            for text in self.choice:
                _check_text("choice", text)
            _check_size("choice", sum(map(len, self.choice)))

    @property
    def schema(self) -> str | None:
        """The JSON schema as text, if there is one."""
        if self.json_object:
            return '{"type":"object"}'
        return None if self.json is None else _as_text(self.json)


def _check_text(name: str, value: Any) -> None:
    must_be(isinstance(value, str) and bool(value), name, "text, and not empty", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidSampling(
            f"{name} has half of a surrogate pair at character {error.start}: {shown(value)}."
        ) from None
    _check_size(name, len(value))


def _check_size(name: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise InvalidSampling(f"{name} has {num_chars:,} characters; the most is {MAX_CHARS:,}.")


def _check_schema(schema: Any) -> None:
    must_be(isinstance(schema, (str, Mapping)), "json", "a JSON schema, as text or as a mapping", schema)
    if isinstance(schema, str):
        _check_text("json", schema)
    try:
        text = _as_text(schema)
        _check_size("json", len(text))
        found = json.loads(text, parse_constant=_no_number)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidSampling(f"json is no JSON: {error}.") from None
    must_be(isinstance(found, dict), "json", "an object that describes a document", found)


def _as_text(schema: str | Mapping[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(dict(schema), ensure_ascii=False)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
