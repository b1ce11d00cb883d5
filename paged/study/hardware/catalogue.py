"""The models and devices that ship with the package, by name, and those in files of the user's own; and what a model's layers keep.

A new model or device is a new file in `models/` or `devices/`.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from paged.attention.kv_dtypes import CODE_BITS, SKIPPED
from paged.errors import (
    BadHardwareFile,
    InvalidConfig,
    MissingExtra,
    NotModelled,
    UnknownDevice,
    UnknownLayers,
    UnknownModel,
)
from paged.model.checkpoint import NAMES, named_or_shipped
from paged.model.kept_layers import config_of, kept_layers
from paged.model.layer_plan import Layers
from paged.model.model_shape import BF16, ModelShape
from paged.study.files import named_in, names_in, read_described
from paged.study.hardware.device import KV_DTYPES, Device, kv_bytes
from paged.study.hardware.hf_config import is_config, name_of, shape_of_config, with_usual_names

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
    return names_in(_FOLDER / "models")


def device_names() -> list[str]:
    """Return the names of the devices that ship, sorted."""
    return names_in(_FOLDER / "devices")


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
    return named_in(_FOLDER / "devices", name, lambda path: read_described(path, Device), UnknownDevice)


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


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A model's `layers`, and a sentence on what is in `doubt`."""

    name: str
    layers: tuple[Layers, ...]
    doubt: str | None = None


def layers_named(
    name: str, *, kv_dtype: str = "bf16", kv_dtype_skip_layers: Sequence[str] = (), floats: str = "bf16"
) -> Kept:
    """Return what a model's layers keep: one of `published_layers` or of `model_names`, a publisher's name, or a file as `model_named` takes it.

    K and V are in `kv_dtype`, those of `kv_dtype_skip_layers` in `floats`; states and tails of convolutions stay as they are. Raises UnknownModel,
    BadHardwareFile, MissingExtra for a configuration that nothing installed reads, InvalidConfig for codes with a scale a head if the size of heads
    is not known, and OSError for a file that cannot be read.
    """
    kept = _kept_as_published(name) or _configured(name)
    if kept is None:
        try:
            kept = _by_shape(model_named(name))
        except UnknownModel:
            raise UnknownModel(name, sorted({*model_names(), *published_layers()})) from None
    head_size = _head_size(name, kept, kv_dtype) if kv_dtype in CODE_BITS else 1
    kinds = {SKIPPED.get(each) for each in kv_dtype_skip_layers}

    def stored(layers: Layers) -> Layers:
        dtype = floats if layers.kind in kinds else kv_dtype
        return replace(layers, entry=tuple(kv_bytes(dtype, piece // BF16, head_size) for piece in layers.entry))

    return replace(kept, layers=tuple(map(stored, kept.layers)))


def _head_size(name: str, kept: Kept, kv_dtype: str) -> int:
    """Return the size of the heads of K and V, to each of which a scale belongs. Raises InvalidConfig."""
    try:
        shape = model_named(name)
    except (UnknownModel, NotModelled):
        shape, size = None, _configured_head_size(name, kept)
        if size is not None:
            return size
    if shape is None or shape.latent:
        what = "it keeps latents, which have none" if shape else "only the bytes of a token are known of it"
        raise InvalidConfig(
            f'kv_dtype is "{kv_dtype}", with a scale a head of {name}, and {what}: it can be '
            f"{', '.join(each for each in KV_DTYPES if each not in CODE_BITS)}"
        )
    return shape.head_dim


def _configured_head_size(name: str, kept: Kept) -> int | None:
    """Return the head size by the configuration; None without one, or if a layer keeps something other than K and V of such heads."""
    document = _document(name)
    if document is None:
        return None
    config = config_of(with_usual_names(document)).get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_heads = (getattr(config, "num_key_value_heads", None) or heads) * size * BF16
    return size if all(each.entry in ((), (of_heads, of_heads)) for each in kept.layers) else None


def _document(name: str) -> dict[str, Any] | None:
    """Return the configuration in the Hugging Face layout that the name stands for; None if it stands for none."""
    if not is_path(name):
        return None
    document = read_described(file_of(name), dict[str, Any])
    return document if is_config(document) else None


def _kept_as_published(name: str) -> Kept | None:
    for known, each in published_layers().items():
        if name.lower() in (known, *map(str.lower, each.aliases)):
            return Kept(name=known, layers=each.layers, doubt=each.doubt)
    return None


def _configured(name: str) -> Kept | None:
    """Return what layers keep by the configuration that the name stands for; None if it stands for none."""
    document, path = _document(name), file_of(name)
    if document is None:
        return None
    try:
        return Kept(name=name_of(path), layers=tuple(kept_layers(config_of(with_usual_names(document)))))
    except (UnknownLayers, MissingExtra) as error:
        try:
            shape = model_named(name)
        except NotModelled as refused:
            raise (refused if isinstance(error, UnknownLayers) else error) from None
        return replace(_by_shape(shape), doubt=f"Layers are taken to be as the configuration says by itself. {error}")
    except InvalidConfig as error:
        raise BadHardwareFile(path, None, str(error)) from None


def _by_shape(shape: ModelShape) -> Kept:
    """Return what layers keep by a shape; every layer keeps all tokens if the shape does not say."""
    if shape.kept:
        return Kept(name=shape.name, layers=shape.kept)
    if shape.latent:
        entry: tuple[int, ...] = ((shape.latent.kv_rank + shape.latent.rope_dim) * BF16,)
    else:
        entry = (shape.kv_heads * shape.head_dim * BF16,) * 2
    return Kept(name=shape.name, layers=(Layers(kind="full", count=shape.layers, entry=entry),))
