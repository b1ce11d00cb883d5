"""The trace formats that are understood: one struct, one function and one line in `FORMATS` each. Our own is written, too.

A file's format is recognised by its first line, not by its name. docs/traces.md explains our own schema.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.whole_file import whole_file
from paged.base.words import shown
from paged.errors import InvalidConfig, TraceError
from paged.study.files import Line, csv_lines, json_lines, json_object, text_lines
from paged.study.limits import MAX_NAME, MAX_PRIORITY, MAX_TOKENS, Id, NotNegative, Tokens, at_least, is_name
from paged.study.traces.content import UNSHARED, starts_of
from paged.study.traces.trace import NOT_DECLARED, Trace

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""
Name = str | int | float
"""As a file has it; see `_name`."""
_LINES_AT_ONCE = 10_000


class Record(msgspec.Struct, frozen=True, gc=False):
    """A request as a format reads it, and its line."""

    line: Line
    arrival_s: float
    output_tokens: int
    segment_ids: Sequence[int]
    segment_lengths: Sequence[int]
    max_tokens: int = NOT_DECLARED
    priority: int = 0
    tenant: str = ""
    output_id: int = UNSHARED


class _Azure(msgspec.Struct):
    moment: str = msgspec.field(name="TIMESTAMP")
    prompt_tokens: Tokens = msgspec.field(name="ContextTokens")
    output_tokens: Tokens = msgspec.field(name="GeneratedTokens")


class _Mooncake(msgspec.Struct):
    timestamp: NotNegative
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Id]


class _Own(msgspec.Struct):
    arrival_s: NotNegative
    output_tokens: Tokens
    prompt_tokens: Tokens | None = None
    prefix_id: Name = ""
    prefix_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    segments: Annotated[list[tuple[Id | None, Tokens]], Meta(min_length=1)] | None = None
    output_id: Id = UNSHARED
    max_tokens: Tokens = NOT_DECLARED
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    tenant: Name = ""


def azure_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Read LLM inference traces of Microsoft's Azure Public Dataset, whose prompts share nothing."""
    for line in lines:
        row = line.read(_Azure)
        try:
            moment = datetime.fromisoformat(row.moment)
        except ValueError:
            raise line.error("TIMESTAMP", f'"{row.moment[:40]}" is not a date and time') from None
        arrival_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        yield Record(line, arrival_s, row.output_tokens, (UNSHARED,), (row.prompt_tokens,))


def mooncake_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Read Moonshot AI's Mooncake: a hash id stands for 512 tokens *and all before them*, the last one for the rest of the prompt."""
    for line in lines:
        row = line.read(_Mooncake)
        before, wanted = len(row.hash_ids) - 1, -(-row.input_length // MOONCAKE_BLOCK)
        if before + 1 != wanted:
            problem = f"{before + 1} ids, but {row.input_length} tokens are {wanted} blocks of {MOONCAKE_BLOCK}"
            raise line.error("hash_ids", problem)
        lengths = [MOONCAKE_BLOCK] * before + [row.input_length - MOONCAKE_BLOCK * before]
        yield Record(line, row.timestamp / 1000, row.output_length, row.hash_ids, lengths)


def schema_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Read a file in our own schema, CSV or JSON Lines. It names shared content by `prefix_id` or by `segments`, since names get numbers here, too."""
    numbers: dict[str, int] = {}
    by: set[str] = set()
    for line in lines:
        row = line.read(_Own)
        segments, prefix = row.segments, _name(line, "prefix_id", row.prefix_id)
        used = [name for name, has in (("segments", segments), ("prefix_id", prefix)) if has]
        by.update(used)
        if len(by) > 1 and used:
            raise line.error(used[0], "a file names what is shared by prefix_id or by segments, not by both")
        if segments is None:
            segments = _prefix_and_rest(line, row, numbers.setdefault(prefix, len(numbers)) if prefix else UNSHARED)
        total = sum(tokens for _, tokens in segments)
        if total > MAX_TOKENS:
            raise line.error("segments", f"{total:,} tokens in one request; at most {MAX_TOKENS:,} are read")
        if row.prompt_tokens not in (None, total):
            raise line.error("prompt_tokens", f"{row.prompt_tokens}, but the segments have {total} tokens together")
        if row.max_tokens != NOT_DECLARED and row.max_tokens < row.output_tokens:
            raise line.error("max_tokens", f"{row.max_tokens}, but the output has {row.output_tokens} tokens")
        yield Record(
            line,
            row.arrival_s,
            row.output_tokens,
            [UNSHARED if content is None else content for content, _ in segments],
            [tokens for _, tokens in segments],
            row.max_tokens,
            row.priority,
            _name(line, "tenant", row.tenant),
            row.output_id,
        )


def _name(line: Line, field: str, value: Name) -> str:
    """Return a name without space around it. Raises TraceError for one that is long, or does not print."""
    text = str(value).strip()
    if not is_name(text):
        raise line.error(field, f"{shown(text)} is not a name; up to {MAX_NAME} characters that print are")
    return text


def _prefix_and_rest(line: Line, row: _Own, number: int) -> list[tuple[int | None, int]]:
    """Return the segments of a prompt that begins with the prefix of this number, or with none."""
    if row.prompt_tokens is None:
        raise line.error("prompt_tokens", "missing")
    if number != UNSHARED and row.prefix_tokens is None:
        raise line.error("prefix_tokens", f'nothing, but prefix_id is "{row.prefix_id}"')
    prefix_tokens = row.prefix_tokens or 0
    if prefix_tokens and number == UNSHARED:
        raise line.error("prefix_id", f"nothing, but prefix_tokens is {prefix_tokens}")
    if prefix_tokens > row.prompt_tokens:
        raise line.error("prefix_tokens", f"{prefix_tokens} of a prompt of {row.prompt_tokens} tokens")
    parts = ((number, prefix_tokens), (None, row.prompt_tokens - prefix_tokens))
    return [(content, tokens) for content, tokens in parts if tokens]


class Format(msgspec.Struct, frozen=True):
    """A trace format: the layout of its records, the columns that it needs, arrivals first, and the function that reads them."""

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

    `seed` chooses the prompts' tokens, but not which prompts share what. Raises TraceError with file, line and column for bad content, and for a
    request that arrives before the one above it, InvalidConfig for a limit below 1, and OSError if the file cannot be opened.
    """
    if limit is not None:
        at_least("the number of requests wanted", limit, 1)
    path = Path(path)
    form = recognise(path)
    lines = csv_lines(path, TraceError) if form.layout == "CSV" else json_lines(path, TraceError)
    kept: list[Record] = []
    for record in form.records(lines):
        if kept and record.arrival_s < kept[-1].arrival_s:
            gap = kept[-1].arrival_s - record.arrival_s
            problem = f"arrives {gap:g} s before the request above it; a trace is sorted by arrival"
            raise record.line.error(form.columns[0], problem)
        kept.append(record)
        if len(kept) == limit:
            break
    if not kept:
        raise TraceError(path, None, None, "the trace is empty: no request in it")
    arrival_s = np.array([record.arrival_s for record in kept], np.float64)
    return Trace(
        name=path.name,
        arrival_s=arrival_s - arrival_s[0],
        output_tokens=np.array([record.output_tokens for record in kept], np.int64),
        segment_starts=starts_of(np.array([len(record.segment_ids) for record in kept], np.int64)),
        segment_ids=_flat(record.segment_ids for record in kept),
        segment_lengths=_flat(record.segment_lengths for record in kept),
        max_tokens=np.array([record.max_tokens for record in kept], np.int64),
        priority=np.array([record.priority for record in kept], np.int64),
        tenant=np.array([record.tenant for record in kept], np.str_),
        output_ids=np.array([record.output_id for record in kept], np.int64),
        seed=seed,
    )


def _flat(rows: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(rows), np.int64)


def recognise(path: Path) -> Format:
    """Return the format of a file by the columns that its first line names. Raises TraceError if no format has them."""
    lines = ((number, text) for number, text in enumerate(text_lines(path, TraceError), start=1) if text.strip())
    number, text = next(lines, (0, ""))
    if not text:
        raise TraceError(path, None, None, "the trace is empty: no request in it")
    layout, names = "CSV", {cell.strip() for cell in next(csv.reader([text]))}
    if text.lstrip()[0] in "{[":
        layout, names = "JSON Lines", set(json_object(path, number, text, TraceError).values)
    candidates = [form for form in FORMATS if form.layout == layout]
    nearest = max(candidates, key=lambda form: len(names.intersection(form.columns)) / len(form.columns))
    missing = [column for column in nearest.columns if column not in names]
    if not missing:
        return nearest
    known = "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in candidates)
    if len(missing) < len(nearest.columns):
        raise TraceError(path, number, missing[0], f"missing, and {nearest.name} traces need it ({layout}; {known})")
    raise TraceError(path, number, None, f"no known trace starts like this; known in {layout} are {known}")


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
