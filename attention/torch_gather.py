"""Attention by gathering K and V through the block tables into a workspace, and torch's products on that.

Runs wherever torch does. Sequences with one token are sorted by length and go in a few buckets, each padded to its longest;
a chunk goes by itself. What is padded or out of a layer's window is read from the scratch block, so that nobody multiplies what a
freed block holds, even by 0. With `is_invariant` it works in fixed pieces instead (`pieces.py`): slower, and the same to the last
bit whatever else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import pieces
from .backend import LayerOptions, LayerShape, working_dtype
from .kv_pool import KVPool
from .step_tokens import Ints, StepTokens
from .workspace import Workspace

# Numbers of buckets that are tried.
_BUCKETS = (1, 2, 4, 8)
# What is gathered and multiplied in the time that the calls of one more bucket take: about 60 microseconds on a CPU.
_BYTES_A_CALL = 400_000


@dataclass(slots=True)
class Part:
    """Sequences that are computed by one call: b of them, each with q tokens over at most L slots.

    tokens      int64 [b * q], their places in the step
    slots       int64 [b, L], anything where there is padding, and context_positions int64 [b, L] of these, -1 there
    positions   int64 [b, q]
    """

    tokens: Tensor
    slots: NDArray[np.int64]
    context_positions: NDArray[np.int64]
    positions: NDArray[np.int64]
    by_window: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """The parts of one step."""

    parts: list[Part]


class Backend:
    """See the module."""

    name = "torch_gather"
    piece = pieces.PIECE

    def __init__(self, is_invariant: bool) -> None:
        self.is_invariant = is_invariant
        self._workspace = Workspace()

    def check(self, shape: LayerShape) -> None:
        """It can do every shape."""

    def prepare(self, step: StepTokens, pool: KVPool) -> Plan | pieces.Plan:
        """Sort the sequences into parts."""
        if self.is_invariant:
            return pieces.prepare(step, pool)
        is_single = np.diff(step.query_start_loc) == 1
        single = is_single.nonzero()[0]
        bytes_per_slot = 2 * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize
        parts = [self._bucket(step, pool, bucket) for bucket in _buckets(single, step.seq_lens[single], bytes_per_slot)]
        parts += [self._chunk(step, pool, i) for i in (~is_single).nonzero()[0].tolist()]
        return Plan(parts)

    def attend(
        self, queries: Tensor, pool: KVPool, layer: int, plan: Plan | pieces.Plan, options: LayerOptions
    ) -> Tensor:
        """See AttentionBackend."""
        if isinstance(plan, pieces.Plan):
            return pieces.attend(queries, pool, layer, plan, options, self._workspace)
        out = torch.zeros_like(queries)
        for part in plan.parts:
            self._attend_part(queries, out, pool, layer, part, options)
        return out

    def _bucket(self, step: StepTokens, pool: KVPool, chosen: Ints) -> Part:
        lengths = step.seq_lens[chosen]
        width = int(lengths.max())
        rising = np.arange(width)
        slots = step.slots_by_column(width, chosen)
        tokens = step.query_start_loc[chosen]
        return Part(
            torch.from_numpy(tokens).to(pool.device),
            slots,
            np.where(rising < lengths[:, None], rising, -1),
            step.positions[tokens][:, None],
        )

    def _chunk(self, step: StepTokens, pool: KVPool, i: int) -> Part:
        first, stop = int(step.query_start_loc[i]), int(step.query_start_loc[i + 1])
        history = step.history(i)
        context_positions = np.concatenate([np.arange(len(history)), step.positions[first:stop]])
        return Part(
            torch.arange(first, stop, device=pool.device),
            np.concatenate([history, step.slot_mapping[first:stop]])[None],
            context_positions[None],
            step.positions[None, first:stop],
        )

    def _attend_part(
        self, queries: Tensor, out: Tensor, pool: KVPool, layer: int, part: Part, options: LayerOptions
    ) -> None:
        num_kv_heads, head_dim = pool.num_kv_heads, pool.head_dim
        (b, num_queries), width = part.positions.shape, part.slots.shape[1]
        rows, hidden = _rows_and_mask(part, options.window, pool)
        keys, values = (each.view(-1, head_dim) for each in pool.slots(layer))
        # The heads of a group read the same K and V, so they stand beside the queries: [b, kv heads, group * queries, head_dim].
        q = queries[part.tokens].view(b, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        group = q.shape[2]
        q = q.reshape(b * num_kv_heads, group * num_queries, head_dim)
        k = self._workspace.gathered("first", keys, rows).view(-1, width, head_dim)
        precise = working_dtype(q.dtype)
        if options.soft_cap is None and options.sinks is None and (num_queries > 1 or q.dtype != precise):
            # It holds neither the scores of a whole chunk nor K and V in more than their 16 bits; else products are faster.
            v = self._workspace.gathered("second", values, rows).view(-1, width, head_dim)
            seen = hidden.logical_not().expand(b, 1, group, num_queries, width).reshape(b, 1, -1, width)
            q, k, v = (each.view(b, num_kv_heads, -1, head_dim) for each in (q, k, v))
            result = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=options.scale)
        else:
            scores = torch.bmm(q.to(precise), k.to(precise).transpose(1, 2)).mul_(options.scale)
            scores = options.capped(scores).view(b, num_kv_heads, group, num_queries, width)
            scores.masked_fill_(hidden, -torch.inf)
            if options.sinks is not None:
                sinks = options.sinks.to(precise).view(num_kv_heads, group, 1, 1).expand(b, -1, -1, num_queries, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = torch.softmax(scores, -1)[..., :width].contiguous()
            # Where the keys lay, which nobody needs any more: that memory is in a cache.
            v = self._workspace.gathered("first", values, rows).view(-1, width, head_dim)
            result = torch.bmm(weights.view(b * num_kv_heads, -1, width), v.to(precise)).to(q.dtype)
        result = result.view(b, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        out[part.tokens] = result.reshape(-1, queries.shape[1], head_dim)


def _buckets(chosen: Ints, lengths: Ints, bytes_per_slot: int) -> list[Ints]:
    """The sequences by length, in as many even parts as cost least: each padded to its longest, and a call for each."""
    if not len(chosen):
        return []
    by_length = np.argsort(lengths, kind="stable")
    rising: list[int] = lengths[by_length].tolist()

    def bounds(count: int) -> list[tuple[int, int]]:
        ends = [len(rising) * i // count for i in range(count + 1)]
        return list(pairwise(ends))

    def cost(count: int) -> int:
        num_slots: int = sum((stop - start) * rising[stop - 1] for start, stop in bounds(count))
        return num_slots * bytes_per_slot + count * _BYTES_A_CALL

    count = min((each for each in _BUCKETS if each <= len(rising)), key=cost)
    return [chosen[by_length[start:stop]] for start, stop in bounds(count)]


def _rows_and_mask(part: Part, window: int | None, pool: KVPool) -> tuple[Tensor, Tensor]:
    """Rows of a layer seen as [slots * kv heads, head_dim], int64 [b * kv heads * L], scratch where no query looks, and what a query
    does not see, bool [b, 1, 1, q, L]; made once a window."""
    if window not in part.by_window:
        context, positions = part.context_positions[:, None, :], part.positions[:, :, None]
        seen = (context >= 0) & (context <= positions)
        if window is not None:
            seen = seen & (context > positions - window)
        slots = np.where(seen.any(1), part.slots, pool.scratch_slot)
        rows = slots[:, None] * pool.num_kv_heads + np.arange(pool.num_kv_heads)[:, None]
        part.by_window[window] = (
            torch.from_numpy(rows.reshape(-1)).to(pool.device),
            torch.from_numpy(~seen[:, None, None]).to(pool.device),
        )
    return part.by_window[window]
