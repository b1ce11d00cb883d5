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
from numpy.typing import NDArray
from torch import Tensor

from attention.backend import LayerOptions, working_dtype
from attention.kv_pool import KVPool
from attention.step_tokens import StepTokens

# Context positions in one piece.
PIECE = 64
# In float32 64 bytes, which is what torch aligns its memory to.
_ALIGNED_WIDTH = 16
# Below every score, and finite, so that no difference of two of them is undefined.
_LOWEST = -1e30


@dataclass(slots=True)
class Plan:
    """What each place sees, before a window: slots, int64 [places, width], and the positions there, -1 where there is nothing.

    positions are the places' own, int64 [places].
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    context_positions: NDArray[np.int64]
    scratch_slot: int
    device: torch.device
    by_window: dict[int | None, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


def prepare(step: StepTokens, pool: KVPool) -> Plan:
    """The slots of what each place sees."""
    places = step.num_tokens + step.num_padded
    width = -(-int(step.context_lens.max(initial=1)) // PIECE) * PIECE
    slots = np.zeros((places, width), np.int64)
    context_positions = np.full((places, width), -1, np.int64)
    for i in range(step.num_sequences):
        first, stop = int(step.starts[i]), int(step.starts[i + 1])
        if step.ancestors is None:
            whole = step.slots_of(i, int(step.context_lens[i]))
            for token in range(first, stop):
                length = int(step.positions[token]) + 1
                slots[token, :length] = whole[:length]
                context_positions[token, :length] = np.arange(length)
            continue
        history = step.history(i)
        for token in range(first, stop):
            own = first + step.ancestors[token, first:stop].nonzero()[0]
            length = len(history) + len(own)
            slots[token, :length] = np.concatenate([history, step.slot_mapping[own]])
            context_positions[token, :length] = np.concatenate([np.arange(len(history)), step.positions[own]])
    positions = np.zeros(places, np.int64)
    positions[: step.num_tokens] = step.positions
    return Plan(slots, positions, context_positions, pool.scratch_slot, pool.device)


def _pieces(plan: Plan, window: int | None, num_kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """For each piece, rows of a pool seen as [slots * num_kv_heads, head_dim], int64 [places * num_kv_heads * PIECE], and what is
    not seen, bool [places, 1, 1, PIECE]."""
    if window not in plan.by_window:
        is_seen = plan.context_positions >= 0
        if window is not None:
            is_seen &= plan.context_positions > plan.positions[:, None] - window
        slots = np.where(is_seen, plan.slots, plan.scratch_slot)
        width = slots.shape[1]
        # Pieces that nobody sees are left out: they would change nothing.
        used = [
            first for first in range(0, width, PIECE) if first == 0 or bool(is_seen[:, first : first + PIECE].any())
        ]
        found = []
        for first in used:
            part = slots[:, None, first : first + PIECE] * num_kv_heads + np.arange(num_kv_heads)[:, None]
            hidden = ~is_seen[:, None, None, first : first + PIECE]
            found.append((torch.from_numpy(part.reshape(-1)).to(plan.device), torch.from_numpy(hidden).to(plan.device)))
        plan.by_window[window] = found
    return plan.by_window[window]


def _aligned(matrices: Tensor) -> Tensor:
    """[n, rows, width]: the same with columns of 0 up to the next width of 16.

    A product's bits depend on where its matrices begin in memory, and those of odd width begin somewhere else at each place.
    """
    missing = -matrices.shape[-1] % _ALIGNED_WIDTH
    return torch.nn.functional.pad(matrices, (0, missing)) if missing else matrices


def attend(queries: Tensor, pool: KVPool, layer: int, plan: Plan, options: LayerOptions) -> Tensor:
    """See AttentionBackend."""
    places, num_heads, head_dim = queries.shape
    num_kv_heads = pool.num_kv_heads
    group = num_heads // num_kv_heads
    precise = working_dtype(queries.dtype)
    keys, values = (part.view(-1, head_dim) for part in pool.slots(layer))
    q = _aligned((queries.to(precise) * options.scale).reshape(places * num_kv_heads, group, head_dim))
    highest = weight = total = None
    for rows, hidden in _pieces(plan, options.window, num_kv_heads):
        k = _aligned(keys.index_select(0, rows).to(precise).view(-1, PIECE, head_dim))
        v = _aligned(values.index_select(0, rows).to(precise).view(-1, PIECE, head_dim))
        scores = options.capped(torch.bmm(q, k.transpose(1, 2)).view(places, num_kv_heads, group, PIECE))
        scores.masked_fill_(hidden, -torch.inf)
        most = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        higher = most if highest is None else torch.maximum(highest, most)
        new = scores.sub_(higher).exp_()
        piece_weight = new.sum(-1, keepdim=True)
        piece = torch.bmm(new.view(-1, group, PIECE), v).view(places, num_kv_heads, group, -1)
        if highest is None or weight is None or total is None:
            weight, total = piece_weight, piece
        else:
            shrink = torch.exp(highest - higher)
            weight = weight.mul_(shrink).add_(piece_weight)
            total = total.mul_(shrink).add_(piece)
        highest = higher
    assert weight is not None, "there is always a first piece"
    assert total is not None, "there is always a first piece"
    # A padded place has seen nothing: 0 / 1, not 0 / 0.
    out = total[..., :head_dim] / weight.clamp_min(torch.finfo(precise).tiny)
    return out.to(queries.dtype).reshape(places, num_heads, head_dim)
