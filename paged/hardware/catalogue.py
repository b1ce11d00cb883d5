"""The models and devices that ship with the package, by name, and those in a file of the user's own.

Knows where the files lie and how one is read. A new model or device is a new file in `models/` or `devices/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from paged.hardware.device import Device
from paged.hardware.errors import BadHardwareFile, UnknownDevice, UnknownModel
from paged.hardware.model_shape import ModelShape

_FOLDER = Path(__file__).parent
_Described = TypeVar("_Described", ModelShape, Device)


def model_names() -> list[str]:
    """The models that ship, sorted."""
    return _names("models")


def device_names() -> list[str]:
    """The devices that ship, sorted."""
    return _names("devices")


def model_named(name: str) -> ModelShape:
    """The model of that name, or the one that a file describes when the name ends in .json.

    Raises UnknownModel, BadHardwareFile for a file that does not describe a model, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return _read(Path(name), ModelShape)
    if name not in (known := model_names()):
        raise UnknownModel(name, known)
    return _read(_FOLDER / "models" / f"{name}.json", ModelShape)


def device_named(name: str) -> Device:
    """The device of that name, or the one that a file describes when the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file that does not describe a device, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return _read(Path(name), Device)
    if name not in (known := device_names()):
        raise UnknownDevice(name, known)
    return _read(_FOLDER / "devices" / f"{name}.json", Device)


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.json"))


def _read(path: Path, kind: type[_Described]) -> _Described:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        problem = str(error)
        raise BadHardwareFile(path, _field(problem), problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadHardwareFile(path, None, f"no JSON: {error}") from None


def _field(problem: str) -> str | None:
    """The field that a message of msgspec's, or of a struct's own check, is about."""
    place = re.search(r"at `(?:key in )?\$\.?(.*?)`$", problem)
    named = re.search(r"field `(\w+)`", problem) or re.match(r"(\w+)(?: of \w+)? (?:is|has) ", problem)
    parts = [found.group(1) for found in (place, named) if found and found.group(1)]
    return ".".join(parts) or None
