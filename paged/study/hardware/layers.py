"""The layers of a named model and what they keep: from a table of models that ship, else from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from paged.attention.kv_dtypes import CODE_BITS, SKIPPED
from paged.errors import BadHardwareFile, InvalidConfig, MissingExtra, NotModelled, UnknownLayers, UnknownModel
from paged.model.kept_layers import config_of, kept_layers
from paged.model.layer_plan import Layers
from paged.model.model_shape import BF16, ModelShape
from paged.study.files import read_described
from paged.study.hardware.catalogue import file_of, is_path, model_named, model_names, published_layers
from paged.study.hardware.device import KV_DTYPES, kv_bytes
from paged.study.hardware.hf_config import is_config, name_of, with_usual_names


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
    kept = _published(name) or _configured(name)
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


def _published(name: str) -> Kept | None:
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
