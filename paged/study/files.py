"""Files that are read: JSON, JSON Lines and CSV, checked by structs, with the place of what is wrong in a bad one."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from msgspec import inspect

from paged.base.fields import in_words
from paged.base.whole_file import whole_file
from paged.base.words import shown
from paged.errors import BadHardwareFile

Kind = TypeVar("Kind")
Refuse = Callable[[Path, int | None, str | int | None, str], Exception]
"""Makes the error of a bad file: path, line (None: the whole file), field or character of the line (None: all of it), and problem."""


def read_described(path: Path, kind: type[Kind]) -> Kind:
    """Read what a file describes. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHardwareFile(path, None, f"no JSON: {error}") from None
    return Line(path, None, document, bad_table).read(kind, strict=True)


def names_in(folder: Path) -> list[str]:
    """Return the names of what a folder's JSON files describe, sorted."""
    return sorted(path.stem for path in folder.glob("*.json"))


def named_in(
    folder: Path, name: str, read: Callable[[Path], Kind], unknown: Callable[[str, list[str]], Exception]
) -> Kind:
    """Read what has this name in a folder, or a file of the user's own if the name ends in .json. Raises `unknown`, and what `read` raises."""
    if name.endswith(".json"):
        return read(Path(name))
    if name not in (known := names_in(folder)):
        raise unknown(name, known)
    return read(folder / f"{name}.json")


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved in a file of its own, as JSON.

    format  says how to read the rest, and is raised when a field changes its meaning
    """

    format: int = 1

    what: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    indent: ClassVar[int] = -1

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load what was saved. Raises BadHardwareFile with the field that is wrong, and OSError for a file that cannot be read."""
        found = read_described(Path(path), _Head).format
        if found != 1:
            its = "no known format" if found is None else f"format {found}"
            raise BadHardwareFile(Path(path), "format", f"{cls.what} of {its}; this paged reads 1{cls.hint}")
        return read_described(Path(path), cls)

    def save(self, path: str | Path) -> None:
        """Write it. Raises UnwritablePath."""
        with whole_file(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self), indent=self.indent).decode() + "\n")


class _Head(msgspec.Struct):
    format: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A record of a file by field, and its place. Values are text in CSV, and JSON's types in JSON Lines; `within` names a part of a record."""

    path: Path
    number: int | None
    values: Any
    refuse: Refuse
    within: str = ""

    def error(self, field: str | None, problem: str) -> Exception:
        """Return the error for a field of this record."""
        return self.refuse(self.path, self.number, f"{self.within}{field or ''}".strip(".") or None, problem)

    def part(self, field: str, values: Any) -> "Line":
        """Return a record within this one."""
        return Line(self.path, self.number, values, self.refuse, f"{self.within}{field}.")

    def read(self, kind: type[Kind], *, strict: bool = False) -> Kind:
        """Return the record as a struct. Unless `strict`, numbers may be text, and `null` or an empty cell is no value. Raises what `error` returns."""
        given = self.values
        if isinstance(given, dict) and not strict:
            given = {name: value for name, value in given.items() if value is not None and value != ""}
        try:
            return msgspec.convert(given, kind, strict=strict)
        except UnicodeEncodeError as error:
            raise self.error(None, f"{shown(error.object)} is no text: it has half of a surrogate pair") from None
        except msgspec.ValidationError as error:
            problem, place, _ = re.split(r" - at `(?:key` in `)?\$\.?(.*)`$|$", str(error), maxsplit=1)
            place = place or ""
            if not problem.startswith(("Expected", "Invalid")):
                # Of msgspec on a field that is missing or unknown, or of a struct's own check.
                named = re.search(r"field `(\w+)`|^(\w+)(?: of \w+)? (?:is|has) ", problem)
                field = f"{place}.{(named[1] or named[2]) if named else ''}".strip(".")
                raise self.error(field, "missing" if "missing required" in problem else problem) from None
            place, info = place.partition("[...]")[0], inspect.type_info(kind)
            for name, number in re.findall(r"(\w+)|\[(\d+)\]", place):
                given = given[name or int(number)]
                info = _inner(info, name or number)
            raise self.error(place, f"it has to be {in_words(info)}; got {shown(given)}") from None


def _inner(info: Any, key: str) -> Any:
    """Return the type of a field or an item of a type, or of one of the types of a union."""
    for each in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(each, inspect.StructType):
            return next(field.type for field in each.fields if field.encode_name == key)
        if isinstance(each, inspect.TupleType):
            return each.item_types[int(key)]
        if isinstance(each, inspect.ListType):
            return each.item_type
    return info


def text_lines(path: Path, refuse: Refuse) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, with or without a byte order mark. Raises what `refuse` makes of other bytes, and OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as problem:
                raise refuse(path, number, problem.start + 1, "not text in UTF-8") from None


def csv_lines(path: Path, refuse: Refuse, columns: Sequence[str] = ()) -> Iterator[Line]:
    """Yield the records of a CSV file with a header that has these columns, without blank lines. Raises what `refuse` makes, and OSError."""
    cells = csv.reader(text_lines(path, refuse), strict=True)
    header: list[str] = []
    try:
        for row in cells:
            row = [cell.strip() for cell in row]
            if not any(row):
                continue
            if not header:
                header = row
                if missing := [name for name in columns if name not in header]:
                    raise refuse(path, None, None, f"there is no column {missing[0]}; there are {', '.join(header)}")
            elif len(row) != len(header):
                raise refuse(path, cells.line_num, None, f"{len(row)} cells, but the header has {len(header)}")
            else:
                yield Line(path, cells.line_num, dict(zip(header, row)), refuse)
    except csv.Error as problem:
        raise refuse(path, cells.line_num, None, f"not CSV: {problem}") from None


def json_lines(path: Path, refuse: Refuse) -> Iterator[Line]:
    """Yield the objects of a JSON Lines file, without blank lines. Raises what `refuse` makes of a line that is no JSON object, and OSError."""
    for number, text in enumerate(text_lines(path, refuse), start=1):
        if text.strip():
            yield json_object(path, number, text, refuse)


def json_object(path: Path, number: int | None, text: str, refuse: Refuse) -> Line:
    """Return the JSON object of a line, or of a whole file. Infinity and NaN, which json.dump writes, are numbers. Raises what `refuse` makes."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise refuse(path, number, problem.colno, f"not JSON: {problem.msg}") from None
    except ValueError as problem:
        raise refuse(path, number, None, f"not JSON: {problem}") from None
    except RecursionError:
        raise refuse(path, number, None, "nested too deeply") from None
    if not isinstance(value, dict):
        raise refuse(path, number, 1, "not a JSON object")
    return Line(path, number, value, refuse)


def bad_table(path: Path, row: int | None, field: str | int | None, problem: str) -> BadHardwareFile:
    """Return the error for a table of timings."""
    return BadHardwareFile(
        path, None if field is None else str(field), problem if row is None else f"row {row:,}: {problem}"
    )
