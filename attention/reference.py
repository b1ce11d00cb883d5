"""Attention as slowly and obviously as it can be written: query by query, over exactly the keys that the query may see.

Every other backend is compared with this one. Products are summed elementwise in float32 (float64 for float64), so that
a result depends on the query and its keys alone: this backend is always invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import LayerOptions, LayerShape, working_dtype
from .kv_pool import LayeredPool
from .layouts.quantised import AnyEntries
from .step_tokens import StepTokens


class Backend:
    """The backend that tests compare others with."""

    name = "reference"
    is_invariant = True
    piece = 1

    def __init__(self, is_invariant: bool) -> None:
        del is_invariant  # It always is.

    def check(self, shape: LayerShape) -> None:
        """Accept every shape."""

    def prepare(self, step: StepTokens, pool: LayeredPool) -> StepTokens:
        """Return the step: it says what each token sees."""
        return step

    def attend(self, queries: Tensor, pool: LayeredPool, layer: int, plan: StepTokens, options: LayerOptions) -> Tensor:
        """See AttentionBackend."""
        own = pool.layer(layer)
        group = queries.shape[1] // own.keys.heads
        precise = working_dtype(queries.dtype)
        asked = own.keys.transformed(queries.to(precise))
        out = asked.new_zeros(*queries.shape[:2], own.values.size)
        firsts = options.first_seen(plan.positions).tolist()
        of_keys, of_values = plan.contexts(own.keys.part), plan.contexts(own.values.part)
        for token, (first, *slots) in enumerate(zip(firsts, of_keys, of_values, strict=True)):
            k, v = (
                _numbers(entries, torch.from_numpy(its // pool.block_size), torch.from_numpy(its % pool.block_size))
                .to(precise)
                .repeat_interleave(group, 1)
                for entries, its in zip((own.keys, own.values), (each[first:] for each in slots), strict=True)
            )
            # [tokens seen, heads]
            scores = options.capped((asked[token] * k).sum(-1) * options.scale)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks.to(precise)[None]])
            weights = torch.softmax(scores, 0)[: len(k)]
            out[token] = (weights.unsqueeze(-1) * v).sum(0)
        return own.values.transformed(out).to(queries.dtype)


def _numbers(entries: AnyEntries, pages: Tensor, places: Tensor) -> Tensor:
    """Return K or V of the tokens at these places of these pages, int64 [n] both: [n, heads, size]."""
    return entries.decoded(*(each.blocks[pages, places] for each in entries.stored))
