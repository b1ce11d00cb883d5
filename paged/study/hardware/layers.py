"""What the layers of a named model keep: of those that ship by their published configurations, of others by their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paged.errors import BadHardwareFile, InvalidConfig, UnknownModel
from paged.model.kept_layers import kept_layers
from paged.model.layer_plan import Layers
from paged.model.model_shape import ModelShape
from paged.study.hardware.catalogue import is_path, model_named, model_names
from paged.study.hardware.files import read_described
from paged.study.hardware.hf_config import decoder_of, is_config

_FILE = Path(__file__).with_name("layer_shapes.json")


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a published configuration that say what layers keep. `is_sure`: all of them were seen in a source."""

    aliases: tuple[str, ...]
    config: dict[str, Any]
    source: str
    is_sure: bool = True


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A model's `layers`, and `notes` on what of them is not sure."""

    name: str
    layers: tuple[Layers, ...]
    notes: tuple[str, ...] = ()


@cache
def published_layers() -> dict[str, Published]:
    """Return the models whose layers are known, by name."""
    return read_described(_FILE, dict[str, Published])


def layers_named(name: str, *, size: int = 2, state_size: int | None = None) -> Kept:
    """Return what the layers of a model keep: one of `published_layers` or of `model_names`, a publisher's name, or a file as `model_named` takes it.

    `size`: bytes of an element of K and V; `state_size`: of a recurrent state, None: as the configuration says. Raises UnknownModel,
    BadHardwareFile, or OSError for a file that cannot be read.
    """
    known = published_layers()
    found = next((key for key, each in known.items() if name.lower() in (key, *map(str.lower, each.aliases))), None)
    if found is not None:
        notes = () if known[found].is_sure else (known[found].source,)
        return Kept(
            name=found, layers=tuple(kept_layers(known[found].config, size=size, state_size=state_size)), notes=notes
        )
    if is_path(name):
        path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
        document = read_described(path, dict[str, Any])
        if is_config(document):
            try:
                layers = kept_layers(decoder_of(document), size=size, state_size=state_size)
            except InvalidConfig as error:
                raise BadHardwareFile(path, None, str(error)) from None
            return Kept(name=path.resolve().parent.name, layers=tuple(layers))
    try:
        shape = model_named(name)
    except UnknownModel:
        raise UnknownModel(name, sorted({*model_names(), *known})) from None
    return Kept(name=shape.name, layers=(_all_alike(shape, size),))


def _all_alike(shape: ModelShape, size: int) -> Layers:
    """Every layer keeps all tokens, as a shape without a configuration says."""
    if shape.latent:
        return Layers(kind="full", count=shape.layers, entry=((shape.latent.kv_rank + shape.latent.rope_dim) * size,))
    return Layers(kind="full", count=shape.layers, entry=(shape.kv_heads * shape.head_dim * size,) * 2)
