"""The models and devices that ship with the package, by name, and those in files of the user's own.

A new model or device is a new file in `models/` or `devices/`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paged.errors import UnknownDevice, UnknownModel
from paged.model.checkpoint import NAMES, named_or_shipped
from paged.model.layer_plan import Layers
from paged.model.model_shape import ModelShape
from paged.study.files import read_described
from paged.study.hardware.device import Device
from paged.study.hardware.hf_config import is_config, shape_of_config

_FOLDER = Path(__file__).parent
_LAYERS = _FOLDER / "layer_shapes.json"
_SAME_SHAPE = ("-instruct", "-chat", "-hf")


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model's layers keep with K and V in bf16, its `source`, and what is in `doubt`."""

    aliases: tuple[str, ...]
    layers: tuple[Layers, ...]
    source: str
    doubt: str | None = None


@cache
def published_layers() -> dict[str, Published]:
    """Return the models whose layers are known, by name."""
    return read_described(_LAYERS, dict[str, Published])


def model_names() -> list[str]:
    """Return the names of the models that ship, sorted."""
    return sorted(path.stem for path in (_FOLDER / "models").glob("*.json"))


def device_names() -> list[str]:
    """Return the names of the devices that ship, sorted."""
    return sorted(path.stem for path in (_FOLDER / "devices").glob("*.json"))


def model_named(name: str) -> ModelShape:
    """Return the model of that name, of a publisher's name (in any case), or in a file: one of our own (.json), a config.json in the Hugging Face
    layout, or a folder that has one.

    A publisher's name may end in -Instruct, -Chat or -hf, which leave the shape as it is, or in -FP8. Raises UnknownModel, BadHardwareFile for a
    file that does not describe a model, and OSError for a file that cannot be read.
    """
    if name in (known := model_names()):
        return _shipped(name)
    if is_path(name):
        path = file_of(name)
        document = read_described(path, dict[str, Any])
        return shape_of_config(path, document) if is_config(document) else read_described(path, ModelShape)
    shape = _published(name.lower())
    if shape is None:
        raise UnknownModel(name, known, _unknown_ending(name))
    return shape


def is_path(name: str) -> bool:
    """Whether the name of a model or device is that of a file or folder, whose content may change."""
    return name.endswith(".json") or name in NAMES or (bool(name) and name not in model_names() and Path(name).is_dir())


def file_of(name: str) -> Path:
    """Return the file that a model's name stands for; of a folder, and of `embedded` and `hybrid`, which ship with weights, the config.json."""
    path = Path(named_or_shipped(name))
    return path / "config.json" if path.is_dir() else path


def device_named(name: str) -> Device:
    """Return the device of that name, or the one in a file if the name ends in .json.

    Raises UnknownDevice, BadHardwareFile for a file that does not describe a device, and OSError for a file that cannot be read.
    """
    if name.endswith(".json"):
        return read_described(Path(name), Device)
    if name not in (known := device_names()):
        raise UnknownDevice(name, known)
    return read_described(_FOLDER / "devices" / f"{name}.json", Device)


@cache
def _shipped(name: str) -> ModelShape:
    """Return a model that ships, with what its layers keep if they are of several kinds."""
    described = read_described(_FOLDER / "models" / f"{name}.json", dict[str, Any])
    layers = published_layers()[name].layers if name in published_layers() else ()
    if any(each.kind != "full" for each in layers):
        described["kept"] = msgspec.to_builtins(layers)
    return msgspec.convert(described, ModelShape)


@cache
def _by_alias() -> dict[str, ModelShape]:
    shapes = [model_named(name) for name in model_names()]
    return {alias.lower(): shape for shape in shapes for alias in shape.aliases} | {
        alias.lower(): msgspec.structs.replace(shape, max_length=longest)
        for shape in shapes
        for alias, longest in shape.variants.items()
    }


def _published(name: str) -> ModelShape | None:
    """Return the model of a publisher's name in lower case, with or without endings."""
    if name in _by_alias():
        return _by_alias()[name]
    for ending in _SAME_SHAPE:
        if name.endswith(ending):
            return _published(name.removesuffix(ending))
    shape = _published(name.removesuffix("-fp8")) if name.endswith("-fp8") else None
    return shape and msgspec.structs.replace(shape, dtype="fp8")


def _unknown_ending(name: str) -> str:
    """Return a sentence on the unknown ending of a name that begins with a known publisher's name; else ""."""
    known = max((alias for alias in _by_alias() if name.lower().startswith(alias)), key=len, default=None)
    if known is None:
        return ""
    return f'{name[: len(known)]} is {_by_alias()[known].name}; what "{name[len(known) :]}" changes of it is not known.'
