"""The trace formats that are understood: one function and one line in `FORMATS` each.

A file's format is recognised by its first line, never from its name.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from paged.errors import InvalidConfig, TraceError
from paged.study.traces.content import UNSHARED
from paged.study.traces.records import Line, Record, collect, csv_lines, json_lines, json_object, text_lines
from paged.study.traces.schema import schema_records
from paged.study.traces.trace import Trace

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""


def azure_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Microsoft's Azure Public Dataset, LLM inference traces: no prompt shares anything."""
    for line in lines:
        text = line.values["TIMESTAMP"].strip()
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise line.error("TIMESTAMP", f'"{text[:40]}" is not a date and time') from None
        arrival_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        prompt_tokens = line.tokens("ContextTokens")
        yield Record(line.number, "TIMESTAMP", arrival_s, line.tokens("GeneratedTokens"), (UNSHARED,), (prompt_tokens,))


def mooncake_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Moonshot AI's Mooncake: a hash id stands for 512 tokens *and all before them*, the last one for what is left of the prompt."""
    for line in lines:
        arrival_s = line.seconds("timestamp") / 1000
        prompt_tokens = line.tokens("input_length")
        ids = line.shared_ids("hash_ids")
        wanted = -(-prompt_tokens // MOONCAKE_BLOCK)
        if len(ids) != wanted:
            problem = f"{len(ids)} ids, but {prompt_tokens} tokens are {wanted} blocks of {MOONCAKE_BLOCK}"
            raise line.error("hash_ids", problem)
        lengths = [MOONCAKE_BLOCK] * len(ids)
        lengths[-1] = prompt_tokens - MOONCAKE_BLOCK * (len(ids) - 1)
        yield Record(line.number, "timestamp", arrival_s, line.tokens("output_length"), ids, lengths)


class Format(msgspec.Struct, frozen=True):
    """A trace format: how its records are laid out, the columns it cannot do without, and the function that reads them."""

    name: str
    layout: Literal["CSV", "JSON Lines"]
    columns: tuple[str, ...]
    records: Callable[[Iterable[Line]], Iterator[Record]]


FORMATS = (
    Format("azure", "CSV", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), azure_records),
    Format("mooncake", "JSON Lines", ("timestamp", "input_length", "output_length", "hash_ids"), mooncake_records),
    Format("paged", "CSV", ("arrival_s", "prompt_tokens", "output_tokens"), schema_records),
    Format("paged", "JSON Lines", ("arrival_s", "prompt_tokens", "output_tokens"), schema_records),
    Format("paged", "JSON Lines", ("arrival_s", "segments", "output_tokens"), schema_records),
)


def read_trace(path: str | Path, *, limit: int | None = None, seed: int = 0) -> Trace:
    """The trace in a file, or its first `limit` requests: later lines are then not read.

    `seed` chooses the prompts' tokens; which prompts share what does not depend on it. Raises TraceError with file, line and column
    for what cannot be read, InvalidConfig for a limit below 1, and OSError where the file cannot be opened.
    """
    if limit is not None and limit < 1:
        raise InvalidConfig(f"{limit} requests of a trace were asked for; at least 1 is needed")
    path = Path(path)
    form = recognise(path)
    lines = csv_lines(path) if form.layout == "CSV" else json_lines(path)
    return collect(path, path.name, form.records(lines), limit=limit, seed=seed)


def recognise(path: Path) -> Format:
    """The format of a file, by the columns that its first line names. Raises TraceError where no format has them."""
    number, text = next(
        ((number, text) for number, text in enumerate(text_lines(path), start=1) if text.strip()), (0, "")
    )
    if not text:
        raise TraceError(str(path), None, None, "the trace is empty: no request in it")
    layout, names = _named_columns(path, number, text)
    candidates = [form for form in FORMATS if form.layout == layout]
    for form in candidates:
        if names.issuperset(form.columns):
            return form
    nearest = max(candidates, key=lambda form: len(names.intersection(form.columns)))
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in candidates)
    if found := names.intersection(nearest.columns):
        missing = [column for column in nearest.columns if column not in found]
        raise TraceError(
            str(path), number, missing[0], f"missing, and {nearest.name} traces need it ({layout}; {known})"
        )
    raise TraceError(str(path), number, None, f"no known trace starts like this; known in {layout} are {known}")


def _named_columns(path: Path, number: int, text: str) -> tuple[Literal["CSV", "JSON Lines"], set[str]]:
    if text.lstrip()[0] in "{[":
        return "JSON Lines", set(json_object(path, number, text))
    try:
        header = next(csv.reader([text], strict=True))
    except (csv.Error, StopIteration):
        header = []
    return "CSV", {cell.strip() for cell in header}
