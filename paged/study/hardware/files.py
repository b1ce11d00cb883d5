"""JSON files that describe a model, a device or a profile, and tables in CSV, with the field or row that is wrong in a bad one."""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from paged.errors import BadHardwareFile

_Described = TypeVar("_Described")


def read_described(path: Path, kind: type[_Described]) -> _Described:
    """Read what a file describes. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        problem = str(error)
        raise BadHardwareFile(path, _field(problem), problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHardwareFile(path, None, f"no JSON: {error}") from None


def _field(problem: str) -> str | None:
    """Return the field that a message of msgspec, or of a struct's own check, names."""
    place = re.search(r"at `(?:key in )?\$\.?(.*?)`$", problem)
    named = re.search(r"field `(\w+)`", problem) or re.match(r"(\w+)(?: of \w+)? (?:is|has) ", problem)
    parts = [found.group(1) for found in (place, named) if found and found.group(1)]
    return ".".join(parts) or None


def check_format(path: Path, wanted: int, what: str, hint: str = "") -> None:
    """Raise BadHardwareFile unless a file has this format, and OSError if it cannot be read."""
    found = read_described(path, _Head).format
    if found != wanted:
        its = "no known format" if found is None else f"format {found}"
        raise BadHardwareFile(path, "format", f"{what} of {its}; this paged reads {wanted}{hint}")


def csv_rows(
    path: Path, columns: Iterable[str], refuse: Callable[[Path, int | None, str], Exception]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file in UTF-8 that has these columns, with their numbers, from 2 on. Raises what `refuse` makes of path, row (None: the
    file) and problem, and OSError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            if missing := [name for name in columns if name not in names]:
                raise refuse(path, None, f"there is no column {missing[0]}; there are {', '.join(names)}")
            for number, row in enumerate(rows, 2):
                if None in row.values():
                    raise refuse(path, number, f"it has fewer cells than the {len(names)} of the header")
                yield number, {name: row[name] for name in names}
    except (csv.Error, UnicodeDecodeError) as error:
        raise refuse(path, None, f"no CSV in UTF-8: {error}") from None


def bad_table(path: Path, row: int | None, problem: str) -> BadHardwareFile:
    """Return the error for a table of timings; see `csv_rows`."""
    return BadHardwareFile(path, None, problem if row is None else f"row {row:,}: {problem}")


class _Head(msgspec.Struct):
    """The field that says how to read the rest of a file."""

    format: int | None = None
