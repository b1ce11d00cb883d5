"""The trace formats that are understood: one function and one line in `FORMATS` each. Our own is written, too.

A file's format is recognised by its first line, not by its name. docs/traces.md explains our own schema.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from paged.base.whole_file import whole_file
from paged.errors import InvalidConfig, TraceError
from paged.study.traces.content import MAX_SHARED_IDS, UNSHARED
from paged.study.traces.limits import MAX_NAME, MAX_PRIORITY, is_name
from paged.study.traces.records import Line, Record, collect, csv_lines, json_lines, json_object, text_lines
from paged.study.traces.trace import NOT_DECLARED, Trace

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""

Segments = list[tuple[int, int]]
_LINES_AT_ONCE = 10_000


def azure_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Read LLM inference traces of Microsoft's Azure Public Dataset, whose prompts share nothing."""
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
    """Read Moonshot AI's Mooncake: a hash id stands for 512 tokens *and all before them*, the last one for the rest of the prompt."""
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


def schema_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Read a file in our own schema, CSV or JSON Lines."""
    prompts = _Prompts()
    for line in lines:
        arrival_s = line.seconds("arrival_s")
        ids, lengths = zip(*prompts.segments(line), strict=True)
        output_tokens = line.tokens("output_tokens")
        max_tokens = line.tokens("max_tokens") if line.says("max_tokens") else NOT_DECLARED
        if max_tokens != NOT_DECLARED and max_tokens < output_tokens:
            raise line.error("max_tokens", f"{max_tokens}, but the output has {output_tokens} tokens")
        has_priority = line.says("priority")
        yield Record(
            line.number,
            "arrival_s",
            arrival_s,
            output_tokens,
            ids,
            lengths,
            max_tokens,
            line.whole("priority", least=-MAX_PRIORITY, most=MAX_PRIORITY) if has_priority else 0,
            line.name("tenant"),
            line.whole("output_id", least=0, most=MAX_SHARED_IDS - 1) if line.says("output_id") else UNSHARED,
        )


class _Prompts:
    """The shared content of prompts, by name (`prefix_id`) or by number (`segments`). A file uses one of the two, since names get numbers here, too."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._has_segments = False

    def segments(self, line: Line) -> Segments:
        """Return the ids and lengths of the segments of a line's prompt. Raises TraceError."""
        if not line.says("segments"):
            return self._prefix_and_rest(line)
        self._has_segments = True
        if line.says("prefix_id") or self._numbers:
            raise line.error("segments", "a file names what is shared by prefix_id or by segments, not by both")
        return _segments(line)

    def _prefix_and_rest(self, line: Line) -> Segments:
        prompt_tokens = line.tokens("prompt_tokens")
        prefix = line.name("prefix_id")
        says_length = line.says("prefix_tokens")
        prefix_tokens = line.tokens("prefix_tokens", at_least=0) if says_length else 0
        if prefix and not says_length:
            raise line.error("prefix_tokens", f'nothing, but prefix_id is "{prefix[:40]}"')
        if prefix_tokens and not prefix:
            raise line.error("prefix_id", f"nothing, but prefix_tokens is {prefix_tokens}")
        if prefix_tokens > prompt_tokens:
            raise line.error("prefix_tokens", f"{prefix_tokens} of a prompt of {prompt_tokens} tokens")
        if prefix and self._has_segments:
            raise line.error("prefix_id", "a file names what is shared by prefix_id or by segments, not by both")
        number = self._numbers.setdefault(prefix, len(self._numbers)) if prefix else UNSHARED
        parts = [(number, prefix_tokens), (UNSHARED, prompt_tokens - prefix_tokens)]
        return [(content, length) for content, length in parts if length]


def _segments(line: Line) -> Segments:
    value = line.values["segments"]
    if not isinstance(value, list) or not value:
        raise line.error("segments", "not a list of at least one [id, tokens]; CSV has no such column")
    segments: Segments = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise line.error("segments", f'"{str(item)[:40]}" is not a pair [id, tokens]')
        content = UNSHARED if item[0] is None else line.as_id("segments", item[0])
        segments.append((content, line.as_tokens("segments", item[1])))
    total = sum(length for _, length in segments)
    # The whole prompt may be too long although no segment is.
    line.as_tokens("segments", total)
    if line.says("prompt_tokens") and line.tokens("prompt_tokens") != total:
        said = line.tokens("prompt_tokens")
        raise line.error("prompt_tokens", f"{said}, but the segments have {total} tokens together")
    return segments


class Format(msgspec.Struct, frozen=True):
    """A trace format: the layout of its records, the columns that it needs, and the function that reads them."""

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
    """Read the trace in a file, or its first `limit` requests and no later line.

    `seed` chooses the prompts' tokens, but not which prompts share what. Raises TraceError with file, line and column for bad content,
    InvalidConfig for a limit below 1, and OSError if the file cannot be opened.
    """
    if limit is not None and limit < 1:
        raise InvalidConfig(f"{limit} requests of a trace were asked for; at least 1 is needed")
    path = Path(path)
    form = recognise(path)
    lines = csv_lines(path) if form.layout == "CSV" else json_lines(path)
    return collect(path, path.name, form.records(lines), limit=limit, seed=seed)


def recognise(path: Path) -> Format:
    """Return the format of a file by the columns that its first line names. Raises TraceError if no format has them."""
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


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace in our own schema, as JSON Lines; what a request does not say is left out.

    `read_trace(path, seed=trace.seed)` gives every column back exactly, and every prompt; the name is then the file's, and `applied` is
    empty. Raises UnwritablePath, and InvalidConfig for a tenant that would not come back as it is.
    """
    for tenant in sorted(set(trace.tenant.tolist())):
        if not is_name(tenant):
            raise InvalidConfig(
                f"tenant {tenant!a} is no name; up to {MAX_NAME} characters that print, no space around"
            )
    encoder = msgspec.json.Encoder()
    with whole_file(path) as file:
        for start in range(0, len(trace), _LINES_AT_ONCE):
            rows = _rows(trace, start, min(start + _LINES_AT_ONCE, len(trace)))
            file.write(encoder.encode_lines(rows).decode())


def _rows(trace: Trace, start: int, stop: int) -> list[dict[str, Any]]:
    starts = trace.segment_starts[start : stop + 1].tolist()
    ids = trace.segment_ids[starts[0] : starts[-1]].tolist()
    lengths = trace.segment_lengths[starts[0] : starts[-1]].tolist()
    columns = (
        column[start:stop].tolist()
        for column in (
            trace.arrival_s,
            trace.output_tokens,
            trace.max_tokens,
            trace.priority,
            trace.tenant,
            trace.output_ids,
        )
    )
    rows = []
    bounds = pairwise(at - starts[0] for at in starts)
    for (first, last), arrival, output, most, priority, tenant, output_id in zip(bounds, *columns, strict=True):
        row = {"arrival_s": arrival, "prompt_tokens": sum(lengths[first:last]), "output_tokens": output}
        if last - first > 1 or ids[first] != UNSHARED:
            pairs = zip(ids[first:last], lengths[first:last], strict=True)
            row["segments"] = [[None if content == UNSHARED else content, length] for content, length in pairs]
        said = (("max_tokens", most, NOT_DECLARED), ("priority", priority, 0), ("tenant", tenant, ""))
        row |= {name: value for name, value, nothing in said if value != nothing}
        if output_id != UNSHARED:
            row["output_id"] = output_id
        rows.append(row)
    return rows
