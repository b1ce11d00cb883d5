"""What each attention layer of a model keeps, as a trial run of the model finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from paged.attention.kv_dtypes import AUTO, head_bytes
from paged.model.layer_plan import Layers


class AttentionLayer(NamedTuple):
    """One attention layer.

    layer       number of the layer in the model
    kind        full: all tokens; window: the last `reach`; chunk: those since the last multiple of `reach`
    num_heads   query heads
    heads       heads that it keeps of a token, each a key of `key_size` and a value of `value_size`
    attended    heads, key size and value size of what it attends to: what it keeps, or what that expands to (MLA)
    source      the earlier layer whose K and V it uses, and then it keeps none; None: it has its own
    in_floats   K and V stay in the model's dtype even if other layers store codes
    index_size  elements of a token's index key, by which later tokens choose what they attend to; 0: no index key
    choosers    groups of its heads, each of which chooses tokens for itself; 0: a token attends to all tokens in reach
    by_itself   the module itself attends, to K and V that it gets; no backend does
    is_one      V is K, which is kept once
    compressed  name and elements of each entry that it keeps of every `stride` tokens besides K and V
    stride      tokens of a compressed entry
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
        """Whether it keeps latents, which expand to K and V."""
        return self.attended != (self.heads, self.key_size, self.value_size)

    def stored_as(self, kv_dtype: str) -> str:
        """Return how its K and V are stored if the model's are stored as `kv_dtype`; latents stay in the model's dtype."""
        return AUTO if self.expands or self.in_floats else kv_dtype

    def kept(self, dtype: torch.dtype, kv_dtype: str = AUTO) -> Layers:
        """Return the K and V that it keeps, and its index key, for a plan of pages."""
        stored = self.stored_as(kv_dtype)
        entry = tuple(
            self.heads * head_bytes(stored, size, dtype.itemsize)
            for size in (self.key_size, self.value_size)[: 1 if self.is_one else 2]
        )
        if self.index_size:
            entry += (self.index_size * dtype.itemsize,)
        return Layers(kind=self.kind, count=1, entry=entry, reach=self.reach)

    def kept_compressed(self, dtype: torch.dtype) -> Layers:
        """Return the compressed entries that it keeps, for a plan of pages."""
        entry = tuple(size * dtype.itemsize for _, size in self.compressed)
        return Layers(kind="full", count=1, entry=entry, stride=self.stride)


def are_alike(layers: Sequence[AttentionLayer]) -> bool:
    """Whether each layer keeps K and V of its own, all of one shape and stored alike, and nothing else: then they lie side by side in blocks of all
    layers."""
    shapes = {(each.heads, each.key_size, each.value_size, each.in_floats) for each in layers}
    return len(shapes) == 1 and all(each.source is None and not each.index_size and not each.is_one for each in layers)
