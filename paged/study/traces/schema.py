"""Our own schema of a trace, read and written: docs/traces.md explains it to people who make such files."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from paged.base.whole_file import whole_file
from paged.errors import InvalidConfig
from paged.study.traces.content import MAX_SHARED_IDS, UNSHARED
from paged.study.traces.limits import MAX_NAME, MAX_PRIORITY, is_name
from paged.study.traces.records import Line, Record
from paged.study.traces.trace import NOT_DECLARED, Trace

_LINES_AT_ONCE = 10_000

Segments = list[tuple[int, int]]


def schema_records(lines: Iterable[Line]) -> Iterator[Record]:
    """The records of a file in our own schema, CSV or JSON Lines."""
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
    """What prompts share: by name (`prefix_id`), or by number (`segments`), but one way a file: a name has no number to differ from."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._has_segments = False

    def segments(self, line: Line) -> Segments:
        """The ids and lengths of a line's prompt. Raises TraceError."""
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
    # A prompt whose every segment may be read may still be too long.
    line.as_tokens("segments", total)
    if line.says("prompt_tokens") and line.tokens("prompt_tokens") != total:
        said = line.tokens("prompt_tokens")
        raise line.error("prompt_tokens", f"{said}, but the segments have {total} tokens together")
    return segments


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
