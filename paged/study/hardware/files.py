"""JSON files that describe a model, a device or a profile, and the field that is wrong in a bad one."""

import re
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


class _Head(msgspec.Struct):
    """The field that says how to read the rest of a file."""

    format: int | None = None
