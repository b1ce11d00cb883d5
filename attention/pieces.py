"""Attention over the context in pieces of one fixed size, for a fixed number of places: the invariant mode of `torch_gather`.

Every product has one shape always, whatever rows are in the step and however long the contexts are, so every sum is taken in one order.
A piece that a token does not see changes nothing, to the bit: its weights are exactly 0 and what was summed before is multiplied
by exactly 1. So a result depends on the token's own context alone. The running maximum and sum over pieces are those of
FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backend import LayerOptions, working_dtype
from .kv_pool import LayeredPool, LayerKV
from .layouts.entries import Entries
from .layouts.quantised import AnyEntries
from .step_tokens import Bools, StepTokens
from .workspace import Workspace

# Context positions in one piece.
PIECE = 64
# In float32 64 bytes, which is what torch aligns its memory to.
_ALIGNED_WIDTH = 16
# Below every score, and finite, so that no difference of two of them is undefined.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Seen:
    """What the places see, each its own of one stretch of positions, from a multiple of PIECE on.

    first    position
    is_seen  bool [places, width]; width is a multiple of PIECE
    starts   the pieces that some place sees, and the first one: where each begins in the width. Others would change nothing.
    hidden   of each of these pieces, bool [places, 1, PIECE]
    """

    first: int
    is_seen: Bools
    starts: list[int]
    hidden: list[Tensor]


@dataclass(slots=True)
class Plan:
    """A step, and what its places see by window and chunk; `rows`: of what is stored of K or V for each piece, int64 [places * kv heads * PIECE],
    the scratch block's where nothing is seen."""

    step: StepTokens
    by_reach: dict[Any, Seen] = field(default_factory=dict)
    rows: dict[Any, list[Tensor]] = field(default_factory=dict)


def prepare(step: StepTokens) -> Plan:
    """Nothing is known before a layer says what it sees."""
    return Plan(step)


def _seen(plan: Plan, options: LayerOptions, pool: LayeredPool) -> Seen:
    if options.reach not in plan.by_reach:
        step = plan.step
        first_seen = options.first_seen(step.positions)
        first = int(first_seen.min(initial=step.positions.max(initial=0))) // PIECE * PIECE
        width = -(-(int(step.seq_lens.max(initial=1)) - first) // PIECE) * PIECE
        is_seen = np.zeros((step.num_tokens + step.num_padded, width), np.bool_)
        rising = np.arange(first, first + width)
        is_seen[: step.num_tokens] = (rising >= first_seen[:, None]) & (rising <= step.positions[:, None])
        starts = [at for at in range(0, width, PIECE) if not at or is_seen[:, at : at + PIECE].any()]
        hidden = [torch.from_numpy(~is_seen[:, None, at : at + PIECE]).to(pool.device) for at in starts]
        plan.by_reach[options.reach] = Seen(first, is_seen, starts, hidden)
    return plan.by_reach[options.reach]


def _rows(plan: Plan, entries: Entries, pool: LayeredPool, options: LayerOptions) -> list[Tensor]:
    key = (options.reach, entries.part, entries.row_steps, entries.heads)
    if key not in plan.rows:
        seen, step = plan.by_reach[options.reach], plan.step
        steps, scratch = entries.row_steps, pool.scratch_block * entries.row_steps.page
        column, offset = divmod(seen.first, pool.block_size)
        width = seen.is_seen.shape[1]
        columns = np.arange(column, column - (-(offset + width) // pool.block_size))[None]
        by_sequence = step.rows_in(np.arange(step.num_sequences), columns, entries.part, steps.page, steps.token)
        rows = np.full(seen.is_seen.shape, scratch)
        rows[: step.num_tokens] = by_sequence[:, offset : offset + width].repeat(np.diff(step.query_start_loc), axis=0)
        rows = np.where(seen.is_seen, rows, scratch)
        heads = np.arange(entries.heads)[:, None] * entries.row_steps.head
        rows = rows[:, None] + heads
        plan.rows[key] = [
            torch.from_numpy(rows[:, :, at : at + PIECE].reshape(-1)).to(pool.device) for at in seen.starts
        ]
    return plan.rows[key]


def _aligned(matrices: Tensor) -> Tensor:
    """[..., width]: the same with columns of 0 up to the next width of 16.

    A product's bits depend on where its matrices begin in memory, and those of odd width begin somewhere else at each place.
    """
    missing = _aligned_width(matrices.shape[-1]) - matrices.shape[-1]
    return torch.nn.functional.pad(matrices, (0, missing)) if missing else matrices


def _aligned_width(width: int) -> int:
    return -(-width // _ALIGNED_WIDTH) * _ALIGNED_WIDTH


def _piece(entries: AnyEntries, rows: Sequence[Tensor], workspace: Workspace) -> Tensor:
    """Of rows of each thing that is stored, the numbers."""
    return entries.decoded(
        *(workspace.gathered("first", each.rows, its) for each, its in zip(entries.stored, rows, strict=True))
    )


def attend(
    queries: Tensor, pool: LayeredPool, own: LayerKV, plan: Plan, options: LayerOptions, workspace: Workspace
) -> Tensor:
    """See AttentionBackend."""
    places, num_heads, _ = queries.shape
    size, value_size = own.keys.size, own.values.size
    if not places:
        return queries.new_empty(0, num_heads, value_size)
    num_kv_heads = own.keys.heads
    group = num_heads // num_kv_heads
    precise = working_dtype(queries.dtype)
    asked = own.keys.transformed(queries.to(precise))
    q = _aligned((asked * options.scale).reshape(places * num_kv_heads, group, size))
    seen = _seen(plan, options, pool)
    of_keys, of_values = (
        list(zip(*(_rows(plan, each, pool, options) for each in entries.stored), strict=True))
        for entries in (own.keys, own.values)
    )
    highest = weight = total = None
    if options.sinks is not None:
        # A score that is seen before all pieces, and brings nothing.
        highest = options.sinks.to(precise).view(1, num_heads, 1).expand(places, -1, -1)
        weight, total = torch.ones_like(highest), highest.new_zeros(places, num_heads, _aligned_width(value_size))
    for hidden, key_rows, value_rows in zip(seen.hidden, of_keys, of_values, strict=True):
        k = _aligned(_piece(own.keys, key_rows, workspace).to(precise).view(-1, PIECE, size))
        scores = options.capped(torch.bmm(q, k.transpose(1, 2)).view(places, -1, PIECE))
        scores.masked_fill_(hidden, -torch.inf)
        most = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        higher = most if highest is None else torch.maximum(highest, most)
        new = scores.sub_(higher).exp_()
        piece_weight = new.sum(-1, keepdim=True)
        # Where the keys lay, which are not needed any more: that memory is in a cache.
        v = _aligned(_piece(own.values, value_rows, workspace).to(precise).view(-1, PIECE, value_size))
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
    found = total[..., :value_size] / weight.clamp_min_(torch.finfo(precise).tiny)
    return own.values.transformed(found).to(queries.dtype)
