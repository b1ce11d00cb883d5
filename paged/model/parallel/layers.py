"""Layers of a split model that need the other ranks; each wraps an ordinary layer with this rank's part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from paged.model.parallel.split import Sizes
from paged.model.parallel.sums import Sums


class SplitLayer(nn.Module):
    """Wraps `inner`. All ranks call these layers in the same order."""

    def __init__(self, inner: nn.Module, sums: Sums) -> None:
        super().__init__()
        self.inner = inner
        self.sums = sums


class SummedLinear(SplitLayer):
    """A linear layer whose inputs are split; its outputs are sums over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., this rank's inputs] → [..., outputs]."""
        return self.sums.added(self.inner(x))


class SplitEmbedding(SplitLayer):
    """An embedding whose vocabulary is split; this rank has `count` ids from `first` on."""

    def __init__(self, inner: Any, sums: Sums, first: int, count: int) -> None:
        super().__init__(inner, sums)
        self.first = first
        self._count = count

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [...] → [..., hidden]."""
        own = ids - self.first
        is_own = (own >= 0) & (own < self._count)
        return self.sums.added(self.inner(own * is_own) * is_own[..., None])


class SplitHead(SplitLayer):
    """A linear layer whose outputs are split; `sizes` has each rank's number."""

    def __init__(self, inner: nn.Module, sums: Sums, sizes: Sequence[int]) -> None:
        super().__init__(inner, sums)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., hidden] → [..., vocabulary], on each rank."""
        return self.sums.joined(self.inner(x), self.sizes)


def join_ranks(module: Any, sizes: Sizes, sums: Sums) -> None:
    """Wrap the layers of a rank's part that need the other ranks, in place."""
    part, body = sums.part, module.model
    for layer in body.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, sums)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, sums)
    spans = [part._replace(rank=rank).span(sizes.vocabulary) for rank in range(part.ranks)]
    first, stop = spans[part.rank]
    body.embed_tokens = SplitEmbedding(body.embed_tokens, sums, first, stop - first)
    module.lm_head = SplitHead(module.lm_head, sums, [stop - first for first, stop in spans])


def inner_of(layer: Any) -> Any:
    """Return the layer with the weights: `layer`, or the one that it wraps."""
    return layer.inner if isinstance(layer, SplitLayer) else layer
