"""Attention over the context in pieces of one size, for a fixed number of places: the invariant mode of `torch_gather`.

All products have one shape, whatever is in the step and however long contexts are, so every sum has one order. A piece
that a token does not see changes no bit: its weights are exactly 0, and earlier sums are multiplied by exactly 1. So a
result depends on the token's own context alone. Running maximum and sum are FlashAttention's (Dao et al., 2022).
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

PIECE = 64  # positions of a context
_ALIGNED_WIDTH = 16  # numbers of float32 in 64 bytes, torch's alignment of memory
_LOWEST = -1e30  # below every score, and finite, so that the difference of two is defined


@dataclass(frozen=True, slots=True)
class Seen:
    """What each place sees of one stretch of positions, which begins at a multiple of PIECE.

    first    the stretch's first position
    is_seen  bool [places, width]; width is a multiple of PIECE
    starts   where pieces begin in the width: the first piece, and all that some place sees; others would change nothing
    hidden   for each of these pieces, bool [places, 1, PIECE]
    """

    first: int
    is_seen: Bools
    starts: list[int]
    hidden: list[Tensor]


@dataclass(slots=True)
class Plan:
    """A step, and what its places see by window and chunk. `rows`: for each piece the rows of K's or V's memory to
    read, int64 [places * kv heads * PIECE]; the scratch block's where nothing is seen."""

    step: StepTokens
    by_reach: dict[Any, Seen] = field(default_factory=dict)
    rows: dict[Any, list[Tensor]] = field(default_factory=dict)


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
        steps = entries.row_steps
        column, offset = divmod(seen.first, pool.block_size)
        width = seen.is_seen.shape[1]
        columns = np.arange(column, column - (-(offset + width) // pool.block_size))[None]
        by_sequence = step.rows_in(np.arange(step.num_sequences), columns, entries.part, steps.page, steps.token)
        rows = np.full(seen.is_seen.shape, pool.scratch_block * steps.page)
        rows[: step.num_tokens] = by_sequence[:, offset : offset + width].repeat(np.diff(step.query_start_loc), axis=0)
        rows[~seen.is_seen] = pool.scratch_block * steps.page
        rows = rows[:, None] + np.arange(entries.heads)[:, None] * steps.head
        plan.rows[key] = [
            torch.from_numpy(rows[:, :, at : at + PIECE].reshape(-1)).to(pool.device) for at in seen.starts
        ]
    return plan.rows[key]


def _aligned(matrices: Tensor) -> Tensor:
    """Pad matrices, [..., width], with columns of 0 to a multiple of 16: a product's bits depend on where its matrices
    begin in memory, and with an odd width each begins at another alignment."""
    missing = _aligned_width(matrices.shape[-1]) - matrices.shape[-1]
    return torch.nn.functional.pad(matrices, (0, missing)) if missing else matrices


def _aligned_width(width: int) -> int:
    return -(-width // _ALIGNED_WIDTH) * _ALIGNED_WIDTH


def _piece(entries: AnyEntries, rows: Sequence[Tensor], workspace: Workspace) -> Tensor:
    """Return the numbers at these rows, one tensor of rows for each part of `entries.stored`."""
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
        # A sink is like a piece before all others, with a score and no value.
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
        # V takes the memory of K, which is not needed any more, and is in the processor's cache.
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
    # A padded place has seen nothing: divide 0 by the least number, not by 0.
    found = total[..., :value_size] / weight.clamp_min_(torch.finfo(precise).tiny)
    return own.values.transformed(found).to(queries.dtype)
