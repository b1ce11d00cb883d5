"""The shape of a loaded decoder, from which the work of a step can be computed."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from torch import nn

from paged.model.loading import LoadedModel
from paged.model.model_shape import ModelShape
from paged.model.native.coded import PackedCodes, QuantisedEmbedding
from paged.model.native.packed import PackedEmbedding, PackedLinear

# Largest share of parameters that a shape may miss, such as norms of queries and keys, or sinks.
_MISSED = 0.01
_BIASES: tuple[Literal["none", "qkv", "all"], ...] = ("none", "qkv", "all")


def shape_of(model: LoadedModel) -> ModelShape | None:
    """Return the shape whose number of parameters is closest to the model's; None if it is more than a hundredth off, as for a mixture of experts, or if
    layers keep states."""
    if model.state_layers:
        return None
    config = model.module.config.get_text_config()
    hidden, longest = int(config.hidden_size), model.max_length or 1
    widths = (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    width = next((each for each in widths if isinstance(each, int)), 4 * hidden)
    shapes = [
        ModelShape(
            name=model.path.name or "model",
            hidden=hidden,
            layers=model.num_layers,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            intermediate=width,
            vocab=model.vocabulary_size,
            max_length=longest,
            tied_embeddings=_is_tied(model.module),
            gated_mlp=is_gated,
            bias=bias,
            learned_positions=positions,
        )
        for is_gated, bias, positions in product((True, False), _BIASES, (0, longest))
    ]
    counted = num_parameters(model)
    nearest = min(shapes, key=lambda shape: abs(shape.parameters - counted))
    return nearest if abs(nearest.parameters - counted) <= _MISSED * counted else None


def num_parameters(model: LoadedModel) -> int:
    """Return the number of parameters of the checkpoint. Padding of packed layers does not count, and shared weights count once."""
    seen: set[int] = set()
    total = 0
    for part in model.module.modules():
        if isinstance(part, PackedEmbedding):
            continue
        if isinstance(part, PackedCodes):
            total += 0 if id(part) in seen else part.outs * part.depth
            seen.add(id(part))
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_packed = isinstance(part, PackedLinear) and name == "packed"
            total += part.in_features * part.out_features if is_packed else parameter.numel()
    return total


def _is_tied(module: Any) -> bool:
    """Whether the output projection is the embedding."""
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if last is None or isinstance(first, (PackedEmbedding, QuantisedEmbedding)):
        return True
    return isinstance(first, nn.Embedding) and getattr(last, "weight", None) is first.weight
