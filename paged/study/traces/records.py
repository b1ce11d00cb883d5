"""From the lines of a file to the columns of a trace, for all formats."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.errors import TraceError
from paged.study.traces.content import MAX_SHARED_IDS, UNSHARED, starts_of
from paged.study.traces.limits import MAX_NAME, MAX_TOKENS, is_name
from paged.study.traces.trace import NOT_DECLARED, Trace


class Record(msgspec.Struct, frozen=True, gc=False):
    """A request as a format reads it. `line` and `column` say where its arrival stands."""

    line: int
    column: str
    arrival_s: float
    output_tokens: int
    segment_ids: Sequence[int]
    segment_lengths: Sequence[int]
    max_tokens: int = NOT_DECLARED
    priority: int = 0
    tenant: str = ""
    output_id: int = UNSHARED


@dataclass(frozen=True, slots=True)
class Line:
    """A record of a file by column, and its place. Values are text in CSV, and JSON's types in JSON Lines."""

    path: str
    number: int
    values: Mapping[str, Any]

    def error(self, column: str | int | None, problem: str) -> TraceError:
        return TraceError(self.path, self.number, column, problem)

    def says(self, column: str) -> bool:
        """Whether a column has a value other than `null` and an empty cell."""
        return self.values.get(column) not in (None, "")

    def tokens(self, column: str, *, at_least: int = 1) -> int:
        """Return a number of tokens. Raises TraceError unless it is a whole number from `at_least` to MAX_TOKENS."""
        return self.as_tokens(column, self.values.get(column), at_least)

    def as_tokens(self, column: str, value: Any, at_least: int = 1) -> int:
        """Return a part of a column's value as a number of tokens; see `tokens`."""
        number = _whole_number(value)
        if number is None:
            raise self.error(column, f"{_shown(value)} is not a whole number of tokens")
        if number < at_least:
            raise self.error(column, f"{number} tokens; at least {at_least} is needed")
        if number > MAX_TOKENS:
            raise self.error(column, f"{number:,} tokens in one request; at most {MAX_TOKENS:,} are read")
        return number

    def whole(self, column: str, *, least: int, most: int) -> int:
        """Return a whole number. Raises TraceError unless it is from `least` to `most`."""
        number = _whole_number(self.values.get(column))
        if number is None or not least <= number <= most:
            given = _shown(self.values.get(column))
            raise self.error(column, f"a whole number from {least:,} to {most:,} is needed; got {given}")
        return number

    def name(self, column: str) -> str:
        """Return a name without space around it, "" for none. Raises TraceError for a value that is no text or does not print."""
        value = self.values.get(column)
        if value is None:
            return ""
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise self.error(column, f"{_shown(value)} is not a name")
        text = str(value).strip()
        if not is_name(text):
            raise self.error(column, f"{_shown(ascii(text))} is not a name; up to {MAX_NAME} characters that print are")
        return text

    def seconds(self, column: str) -> float:
        """Return a time in the column's unit. Raises TraceError unless it is a finite number, 0 or more."""
        value = self.values.get(column)
        try:
            if isinstance(value, bool | None):
                raise ValueError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.error(column, f"{_shown(value)} is not a time") from None
        if not 0 <= number < float("inf"):
            raise self.error(column, f"{_shown(value)} is not a time; it must be finite and not negative")
        return number

    def shared_ids(self, column: str) -> list[int]:
        """Return a list of ids of shared content. Raises TraceError unless each is a whole number from 0 to 2**30 − 1."""
        value = self.values.get(column)
        if not isinstance(value, list):
            raise self.error(column, f"{_shown(value)} is not a list of ids")
        return [self.as_id(column, item) for item in value]

    def as_id(self, column: str, value: Any) -> int:
        """Return an id of shared content. Raises TraceError unless it is a whole number from 0 to 2**30 − 1."""
        if type(value) is not int or not 0 <= value < MAX_SHARED_IDS:
            problem = f"{_shown(value)} is not an id; ids are whole numbers from 0 to {MAX_SHARED_IDS - 1:,}"
            raise self.error(column, problem)
        return value


def _whole_number(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        # int() would also take "1_000" and digits of other scripts, and refuses thousands of digits with its own message.
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 18 else None
    return value if type(value) is int else None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = str(value)
    return f'"{text[:40]}…"' if len(text) > 40 else f'"{text}"'


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, with or without a byte order mark. Raises TraceError for other bytes, and OSError as open() does."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as problem:
                raise TraceError(str(path), number, problem.start + 1, "not text in UTF-8") from None


def csv_lines(path: Path) -> Iterator[Line]:
    """Yield the records of a CSV file with a header, without blank lines. Raises TraceError for a line with another number of cells."""
    cells = csv.reader(text_lines(path), strict=True)
    header: list[str] | None = None
    try:
        for row in cells:
            if not any(cell.strip() for cell in row):
                continue
            if header is None:
                header = [cell.strip() for cell in row]
                continue
            if len(row) != len(header):
                raise TraceError(str(path), cells.line_num, None, f"{len(row)} cells, but the header has {len(header)}")
            yield Line(str(path), cells.line_num, dict(zip(header, row, strict=True)))
    except csv.Error as problem:
        raise TraceError(str(path), cells.line_num, None, f"not CSV: {problem}") from None


def json_lines(path: Path) -> Iterator[Line]:
    """Yield the objects of a JSON Lines file, without blank lines. Raises TraceError for a line that is no JSON object."""
    for number, text in enumerate(text_lines(path), start=1):
        if not text.strip():
            continue
        yield Line(str(path), number, json_object(path, number, text))


def json_object(path: Path, number: int, text: str) -> dict[str, Any]:
    """Return the JSON object of a line. Raises TraceError with the place where parsing stopped."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as problem:
        message = str(problem)
        # msgspec says "(byte 14)", counted from 0; a line that ends too early has no such place.
        _, _, place = message.rpartition("(byte ")
        column = int(place.rstrip(")")) + 1 if place.rstrip(")").isdigit() else len(text.rstrip("\r\n")) + 1
        raise TraceError(str(path), number, column, f"not JSON: {message.partition(' (byte')[0]}") from None
    except RecursionError:
        raise TraceError(str(path), number, None, "not a request: nested too deeply") from None
    if not isinstance(value, dict):
        raise TraceError(str(path), number, 1, "not a JSON object")
    return value


def collect(path: Path, name: str, records: Iterable[Record], *, limit: int | None, seed: int) -> Trace:
    """Make a trace of the first `limit` records; the first one arrives at 0 s.

    Raises TraceError without records, and for one that arrives before the one above it.
    """
    kept: list[Record] = []
    for record in records:
        if kept and record.arrival_s < kept[-1].arrival_s:
            gap = kept[-1].arrival_s - record.arrival_s
            problem = f"arrives {gap:g} s before the request above it; a trace is sorted by arrival"
            raise TraceError(str(path), record.line, record.column, problem)
        kept.append(record)
        if len(kept) == limit:
            break
    if not kept:
        raise TraceError(str(path), None, None, "the trace is empty: no request in it")
    arrival_s = np.array([record.arrival_s for record in kept], np.float64)
    return Trace(
        name=name,
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
