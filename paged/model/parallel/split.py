"""The part of each weight that a rank has; it follows from the rank's number alone.

    q, k, v, gate, up        rows: some heads, some columns between gate and down
    o, down                  columns, so each rank has a part of the sum; only rank 0 has their biases
    embedding, head          rows: some of the vocabulary
    norms                    whole

KV heads are split, or repeated if there are fewer than ranks.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import zip_longest
from math import gcd
from typing import Any, NamedTuple

from paged.errors import UnevenSplit, UnsupportedModel

FAMILIES = tuple(f"{each}ForCausalLM" for each in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"))
"""transformers' classes whose weights can be split: they name their layers alike."""
# Columns between gate and down are split in pieces of up to this many, so that vectors stay whole.
_PIECE = 16


class Part(NamedTuple):
    """The part of rank `rank` of `ranks`."""

    rank: int
    ranks: int

    def span(self, size: int, piece: int = 1) -> tuple[int, int]:
        """Return (first, stop): the rank's part of `size` items, in whole pieces, as even as possible."""
        count = size // piece
        first, stop = (count * each // self.ranks * piece for each in (self.rank, self.rank + 1))
        return first, stop

    def kv_span(self, kv_heads: int) -> tuple[int, int]:
        """Return (first, stop) of its KV heads: several, or one that other ranks have, too."""
        if kv_heads >= self.ranks:
            return self.span(kv_heads)
        head = self.rank * kv_heads // self.ranks
        return head, head + 1


class Sizes(NamedTuple):
    """Sizes of the whole model."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @staticmethod
    def of(config: Any) -> Sizes:
        """Return the sizes in a configuration."""
        heads = config.num_attention_heads
        return Sizes(
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.intermediate_size,
            config.vocab_size,
        )

    def degrees(self) -> list[int]:
        """Return the numbers of ranks over which the heads can be split, from 2 on."""
        kv = self.kv_heads
        return [
            each for each in range(2, self.heads + 1) if self.heads % each == 0 and (kv % each == 0 or each % kv == 0)
        ]


def check_split(config: Any, ranks: int, name: object) -> None:
    """Raise UnsupportedModel for a model that is not split, and UnevenSplit for a number of ranks that does not divide its heads."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architecture = found.__name__
    if architecture not in FAMILIES:
        known = ", ".join(each.removesuffix("ForCausalLM") for each in FAMILIES)
        raise UnsupportedModel(
            f"{name}: tensor_parallel_size={ranks} splits models of {known}; {architecture} runs with 1."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"{name}: tensor_parallel_size={ranks} splits weights that are floats; these are codes, and run with 1."
        )
    sizes = Sizes.of(config)
    if ranks not in sizes.degrees():
        raise UnevenSplit(str(name), ranks, sizes.heads, sizes.kv_heads, sizes.degrees())
    least = min(sizes.vocabulary, sizes.intermediate)
    if least < ranks:
        raise UnsupportedModel(
            f"{name}: tensor_parallel_size={ranks} is more than its vocabulary or its gated products have: {least}."
        )


def config_of_part(config: Any, part: Part) -> Any:
    """Return the configuration of a rank's part as a model of its own. After building, the caller sets the whole vocabulary again."""
    sizes, found = Sizes.of(config), deepcopy(config)
    first, stop = part.kv_span(sizes.kv_heads)
    found.head_dim = sizes.head_dim
    found.num_attention_heads = sizes.heads // part.ranks
    found.num_key_value_heads = stop - first
    found.intermediate_size = _length(columns_of(sizes, part))
    found.vocab_size = _length(part.span(sizes.vocabulary))
    # The id may be in another rank's part, and inference does not use it.
    found.pad_token_id = None
    return found


def columns_of(sizes: Sizes, part: Part) -> tuple[int, int]:
    """Return (first, stop) of a rank's columns between gate and down."""
    piece = gcd(sizes.intermediate, _PIECE)
    return part.span(sizes.intermediate, piece if sizes.intermediate >= piece * part.ranks else 1)


def slice_of(key: str, sizes: Sizes, part: Part) -> tuple[slice, ...] | None:
    """Return the slices of a weight or bias that a rank reads: `()` for all of it; None for nothing, where the rank has zeros."""
    *_, layer, kind = key.split(".")
    size = sizes.head_dim
    kv = slice(*(each * size for each in part.kv_span(sizes.kv_heads)))
    heads = slice(*(each * size for each in part.span(sizes.heads)))
    rows = {
        "q_proj": heads,
        "k_proj": kv,
        "v_proj": kv,
        **dict.fromkeys(("gate_proj", "up_proj"), slice(*columns_of(sizes, part))),
        **dict.fromkeys(("embed_tokens", "lm_head"), slice(*part.span(sizes.vocabulary))),
    }
    columns = {"o_proj": heads, "down_proj": slice(*columns_of(sizes, part))}
    if layer in rows:
        return (rows[layer],)
    if layer not in columns:
        return ()
    if kind == "bias":
        return () if part.rank == 0 else None
    return slice(None), columns[layer]


def whole_shape(key: str, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of the whole weight or bias, given the shape of a rank's part."""
    whole = slice_of(key, sizes, Part(0, 1)) or ()
    return tuple(size if each is None or each == slice(None) else each.stop for size, each in zip_longest(shape, whole))


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
