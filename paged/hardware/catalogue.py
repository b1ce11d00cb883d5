"""The models and devices that ship with the package, by name, and those in a file of the user's own.

Knows where the files lie. A new model or device is a new file in `models/` or `devices/`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paged.hardware.device import Device
from paged.hardware.errors import UnknownDevice, UnknownModel
from paged.hardware.files import read_described
from paged.hardware.model_shape import ModelShape

_FOLDER = Path(__file__).parent


def model_names() -> list[str]:
    """The models that ship, sorted."""
    return _names("models")


def device_names() -> list[str]:
    """The devices that ship, sorted."""
    return _names("devices")


def model_named(name: str) -> ModelShape:
    """The model of that name or of one that its publisher uses (upper and lower case alike), or the one that a file describes when the
    name ends in .json.

    Raises UnknownModel, BadHardwareFile for a file that does not describe a model, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return read_described(Path(name), ModelShape)
    if name in (known := model_names()):
        return read_described(_FOLDER / "models" / f"{name}.json", ModelShape)
    shape = _by_alias().get(name.lower())
    if shape is None:
        raise UnknownModel(name, known)
    return shape


def device_named(name: str) -> Device:
    """The device of that name, or the one that a file describes when the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file that does not describe a device, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return read_described(Path(name), Device)
    if name not in (known := device_names()):
        raise UnknownDevice(name, known)
    return read_described(_FOLDER / "devices" / f"{name}.json", Device)


@cache
def _by_alias() -> dict[str, ModelShape]:
    return {alias.lower(): shape for shape in map(model_named, model_names()) for alias in shape.aliases}


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.json"))
