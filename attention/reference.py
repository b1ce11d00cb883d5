"""Attention as slowly and obviously as it can be written: query by query, over exactly the keys that the query may see.

Every other backend is held against this one. Products are summed elementwise in float32 (float64 for float64), so that a result
depends on the query and its keys alone, and this backend is invariant whether asked to be or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import LayerOptions, LayerShape, working_dtype
from .kv_pool import KVPool
from .step_tokens import Ints, StepTokens


@dataclass(frozen=True, slots=True)
class Plan:
    """For each token, its position, and the slots and positions of all that it may see, in order."""

    seen: list[tuple[int, Ints, Ints]]


class Backend:
    """The oracle."""

    name = "reference"
    is_invariant = True
    piece = 1

    def __init__(self, is_invariant: bool) -> None:
        del is_invariant  # It always is.

    def check(self, shape: LayerShape) -> None:
        """It can do every shape."""

    def prepare(self, step: StepTokens, pool: KVPool) -> Plan:
        """What each token sees: its sequence's history, and of this step what comes before it."""
        positions = step.positions.tolist()
        return Plan([(position, *seen) for position, seen in zip(positions, step.contexts(), strict=True)])

    def attend(self, queries: Tensor, pool: KVPool, layer: int, plan: Plan, options: LayerOptions) -> Tensor:
        """See AttentionBackend."""
        keys, values = pool.slots(layer)
        group = queries.shape[1] // pool.num_kv_heads
        precise = working_dtype(queries.dtype)
        out = torch.zeros_like(queries)
        for token, (position, slots, positions) in enumerate(plan.seen):
            if options.window is not None:
                slots = slots[positions > position - options.window]
            index = torch.from_numpy(slots).to(queries.device)
            k = keys[index].to(precise).repeat_interleave(group, 1)
            v = values[index].to(precise).repeat_interleave(group, 1)
            # [tokens seen, heads]
            scores = options.capped((queries[token].to(precise) * k).sum(-1) * options.scale)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks.to(precise)[None]])
            weights = torch.softmax(scores, 0)[: len(k)]
            out[token] = (weights.unsqueeze(-1) * v).sum(0).to(out.dtype)
        return out
