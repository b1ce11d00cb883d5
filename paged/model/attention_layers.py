"""The K and V that each attention layer of a model keeps, found by a trial run of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from paged.attention.kv_dtypes import AUTO, head_bytes
from paged.model.layer_plan import Layers


class AttentionLayer(NamedTuple):
    """One attention layer.

    layer       its number in the model
    kind        full: all tokens; window: the last `reach`; chunk: those since the last multiple of `reach`
    num_heads   of its queries
    heads       of what it keeps of a token: `heads` of `key_size`, and as many of `value_size`
    attended    heads, key size and value size of what it attends to: what it keeps, or what that expands to (MLA)
    source      the earlier layer whose K and V it attends to, and keeps none of its own; None: it has its own
    in_floats   its K and V stay in the model's dtype whatever those of others are stored as
    index_size  elements of a token's index key, by which later tokens choose what they attend to; 0: it keeps none
    choosers    groups of its heads, each of which chooses for itself; 0: a token attends to all that it can
    by_itself   its module attends, to K and V that it is given; no backend does
    is_one      its V is its K, which is kept once
    compressed  name and elements of each entry that it keeps of every `stride` tokens beside K and V
    """

    layer: int
    kind: Literal["full", "window", "chunk"]
    reach: int
    num_heads: int
    heads: int
    key_size: int
    value_size: int
    attended: tuple[int, int, int]
    source: int | None = None
    in_floats: bool = False
    index_size: int = 0
    choosers: int = 0
    by_itself: bool = False
    is_one: bool = False
    compressed: tuple[tuple[str, int], ...] = ()
    stride: int = 1

    @property
    def expands(self) -> bool:
        """Whether it keeps latents, which expand to what it attends to."""
        return self.attended != (self.heads, self.key_size, self.value_size)

    def stored_as(self, kv_dtype: str) -> str:
        """How its K and V are stored where those of the model are to be so: latents stay in the model's dtype."""
        return AUTO if self.expands or self.in_floats else kv_dtype

    def kept(self, dtype: torch.dtype, kv_dtype: str = AUTO) -> Layers:
        """What it keeps, as a plan of pages takes it."""
        stored = self.stored_as(kv_dtype)
        entry = tuple(
            self.heads * head_bytes(stored, size, dtype.itemsize)
            for size in (self.key_size, self.value_size)[: 1 if self.is_one else 2]
        )
        if self.index_size:
            entry += (self.index_size * dtype.itemsize,)
        return Layers(kind=self.kind, count=1, entry=entry, reach=self.reach)

    def kept_compressed(self, dtype: torch.dtype) -> Layers:
        """What it keeps of every `stride` tokens, in the model's dtype."""
        entry = tuple(size * dtype.itemsize for _, size in self.compressed)
        return Layers(kind="full", count=1, entry=entry, stride=self.stride)


def are_alike(layers: Sequence[AttentionLayer]) -> bool:
    """Whether all layers keep K and V of one shape, stored alike, each its own, and nothing else: then they can lie side by side in blocks of all
    layers."""
    shapes = {(each.heads, each.key_size, each.value_size, each.in_floats) for each in layers}
    return len(shapes) == 1 and all(each.source is None and not each.index_size and not each.is_one for each in layers)
