"""Attention over the context in pieces of one fixed size, for a fixed number of places: the invariant mode of `torch_gather`.

Every product has one shape always, whoever is in the step and however long the contexts are, so every sum is taken in one order.
A piece that a token does not see changes nothing, to the bit: its weights are exactly 0 and what was summed before is multiplied
by exactly 1. So a result depends on the token's own context alone. The running maximum and sum over pieces are those of
FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .backend import LayerOptions, working_dtype
from .kv_pool import KVPool
from .step_tokens import Ints, StepTokens
from .workspace import Workspace

# Context positions in one piece.
PIECE = 64
# In float32 64 bytes, which is what torch aligns its memory to.
_ALIGNED_WIDTH = 16
# Below every score, and finite, so that no difference of two of them is undefined.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Piece:
    """What all places see of one stretch of PIECE positions.

    rows    int64 [places * kv heads * PIECE], of a layer seen as [slots * kv heads, head_dim]; the scratch block's where nothing is seen
    hidden  bool [places, 1, PIECE]
    """

    rows: Tensor
    hidden: Tensor


@dataclass(slots=True)
class Plan:
    """What each place sees, before a window.

    slots, context_positions  int64 [places, width]; where there is nothing, any slot and position -1
    positions                 int64 [places], the places' own
    """

    slots: Ints
    context_positions: Ints
    positions: Ints
    by_window: dict[int | None, list[Piece]] = field(default_factory=dict)


def prepare(step: StepTokens, pool: KVPool) -> Plan:
    """The slots of what each place sees."""
    places, count = step.num_tokens + step.num_padded, step.num_tokens
    width = -(-int(step.seq_lens.max(initial=1)) // PIECE) * PIECE
    plan = Plan(np.zeros((places, width), np.int64), np.full((places, width), -1, np.int64), np.zeros(places, np.int64))
    plan.positions[:count] = step.positions
    rising = np.arange(width)
    plan.context_positions[:count] = np.where(rising <= step.positions[:, None], rising, -1)
    by_sequence = step.slots_by_column(width)
    plan.slots[:count, : by_sequence.shape[1]] = by_sequence.repeat(np.diff(step.query_start_loc), axis=0)
    return plan


def _pieces(plan: Plan, window: int | None, pool: KVPool) -> list[Piece]:
    if window not in plan.by_window:
        is_seen = plan.context_positions >= 0
        if window is not None:
            is_seen &= plan.context_positions > plan.positions[:, None] - window
        heads = np.arange(pool.num_kv_heads)[:, None]
        rows = np.where(is_seen, plan.slots, pool.scratch_slot)[:, None] * pool.num_kv_heads + heads
        # Pieces that nobody sees are left out: they would change nothing.
        starts = [first for first in range(0, rows.shape[2], PIECE) if not first or is_seen[:, first:][:, :PIECE].any()]
        plan.by_window[window] = [
            Piece(
                torch.from_numpy(rows[:, :, first : first + PIECE].reshape(-1)).to(pool.device),
                torch.from_numpy(~is_seen[:, None, first : first + PIECE]).to(pool.device),
            )
            for first in starts
        ]
    return plan.by_window[window]


def _aligned(matrices: Tensor) -> Tensor:
    """[..., width]: the same with columns of 0 up to the next width of 16.

    A product's bits depend on where its matrices begin in memory, and those of odd width begin somewhere else at each place.
    """
    missing = -matrices.shape[-1] % _ALIGNED_WIDTH
    return torch.nn.functional.pad(matrices, (0, missing)) if missing else matrices


def attend(
    queries: Tensor, pool: KVPool, layer: int, plan: Plan, options: LayerOptions, workspace: Workspace
) -> Tensor:
    """See AttentionBackend."""
    places, num_heads, head_dim = queries.shape
    if not places:
        return torch.empty_like(queries)
    num_kv_heads = pool.num_kv_heads
    group = num_heads // num_kv_heads
    precise = working_dtype(queries.dtype)
    keys, values = (part.view(-1, head_dim) for part in pool.slots(layer))
    q = _aligned((queries.to(precise) * options.scale).reshape(places * num_kv_heads, group, head_dim))
    highest = weight = total = None
    if options.sinks is not None:
        # A score that is seen before all pieces, and brings nothing.
        highest = options.sinks.to(precise).view(1, num_heads, 1).expand(places, -1, -1)
        weight, total = torch.ones_like(highest), highest.new_zeros(places, num_heads, q.shape[-1])
    for piece in _pieces(plan, options.window, pool):
        k = _aligned(workspace.gathered("first", keys, piece.rows).to(precise).view(-1, PIECE, head_dim))
        scores = options.capped(torch.bmm(q, k.transpose(1, 2)).view(places, -1, PIECE))
        scores.masked_fill_(piece.hidden, -torch.inf)
        most = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        higher = most if highest is None else torch.maximum(highest, most)
        new = scores.sub_(higher).exp_()
        piece_weight = new.sum(-1, keepdim=True)
        # Where the keys lay, which nobody needs any more: that memory is in a cache.
        v = _aligned(workspace.gathered("first", values, piece.rows).to(precise).view(-1, PIECE, head_dim))
        piece_total = torch.bmm(new.view(-1, group, PIECE), v).view(places, num_heads, -1)
        if highest is None or weight is None or total is None:
            weight, total = piece_weight, piece_total
        else:
            shrink = torch.exp(highest - higher)
            weight = weight.mul_(shrink).add_(piece_weight)
            total = total.mul_(shrink).add_(piece_total)
        highest = higher
    assert weight is not None, "there is always a first piece"
    assert total is not None, "there is always a first piece"
    # A padded place has seen nothing: 0 / 1, not 0 / 0.
    return (total[..., :head_dim] / weight.clamp_min_(torch.finfo(precise).tiny)).to(queries.dtype)
