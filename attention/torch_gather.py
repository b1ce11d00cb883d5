"""Attention by torch over K and V that are gathered through the block tables into a workspace.

Runs wherever torch does. Sequences with one token go in a few buckets by length, each padded to its longest; a chunk
goes by itself. Padding, and what is out of a layer's window, is read from the scratch block: what a freed block holds
enters no product, not even times 0. With `is_invariant` it works in fixed pieces (`pieces.py`): slower, and the same to
the last bit whatever else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import pieces
from .backend import LayerOptions, LayerShape, working_dtype
from .kv_pool import LayeredPool, LayerKV
from .layouts.entries import Entries
from .layouts.quantised import AnyEntries
from .step_tokens import Bools, Ints, StepTokens
from .workspace import Workspace

_BUCKETS = (1, 2, 4, 8)  # numbers of buckets to choose from
# Bytes that are gathered and multiplied in the time of one more bucket's calls: about 60 microseconds on a CPU.
_BYTES_A_CALL = 400_000


@dataclass(slots=True)
class Part:
    """b sequences of q tokens each, which one call computes.

    sequences   int64 [b]
    tokens      int64 [b * q], their places in the step
    positions   int64 [b, q]
    by_reach    what the tokens see, by window and chunk
    rows        rows of K or V to gather, int64 [b * kv heads * L]: by reach, page of a block, steps and heads
    """

    step: StepTokens
    sequences: Ints
    tokens: Tensor
    positions: Ints
    by_reach: dict[Any, Seen] = field(default_factory=dict)
    rows: dict[Any, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the tokens of a part see: at most L slots of each sequence.

    columns  int64 [b, c]: the columns of the tables that hold the L slots, from the first one that a token sees on
    used     bool [b, L]: some token sees the slot
    hidden   bool [b, 1, 1, q, L]: a token does not see the slot
    """

    columns: Ints
    used: Bools
    hidden: Tensor

    @property
    def width(self) -> int:
        """L."""
        return len(self.used[0])


class Backend:
    """See the module."""

    name = "torch_gather"
    piece = pieces.PIECE

    def __init__(self, is_invariant: bool) -> None:
        self.is_invariant = is_invariant
        self._workspace = Workspace()

    def check(self, shape: LayerShape) -> None:
        """Accept every shape."""

    def prepare(self, step: StepTokens, pool: LayeredPool) -> list[Part] | pieces.Plan:
        """Sort the sequences into parts. In the invariant mode the plan is empty: what a layer sees is known when it
        attends."""
        if self.is_invariant:
            return pieces.Plan(step)
        is_single = np.diff(step.query_start_loc) == 1
        single = is_single.nonzero()[0]
        parts = [_part(step, pool, each) for each in _buckets(single, step.seq_lens[single], pool.bytes_per_slot)]
        return parts + [_part(step, pool, np.array([i])) for i in (~is_single).nonzero()[0].tolist()]

    def attend(
        self, queries: Tensor, pool: LayeredPool, layer: int, plan: list[Part] | pieces.Plan, options: LayerOptions
    ) -> Tensor:
        """See AttentionBackend."""
        own = pool.layer(layer)
        if isinstance(plan, pieces.Plan):
            return pieces.attend(queries, pool, own, plan, options, self._workspace)
        asked = own.keys.transformed(queries)
        out = asked.new_zeros(*queries.shape[:2], own.values.size)
        for part in plan:
            self._attend_part(asked, out, pool, own, part, options)
        return own.values.transformed(out).to(queries.dtype)

    def _attend_part(
        self, queries: Tensor, out: Tensor, pool: LayeredPool, own: LayerKV, part: Part, options: LayerOptions
    ) -> None:
        num_kv_heads, size, value_size = own.keys.heads, own.keys.size, own.values.size
        b, num_queries = part.positions.shape
        seen = _seen(part, options, pool)
        width = seen.width
        # Heads of a group read the same K and V, so they become more queries: [b, kv heads, group * queries, size].
        q = queries[part.tokens].view(b, num_queries, num_kv_heads, -1, size).permute(0, 2, 3, 1, 4)
        group = q.shape[2]
        q = q.reshape(b * num_kv_heads, group * num_queries, size)
        precise = working_dtype(q.dtype)
        if options.soft_cap is None and options.sinks is None and (num_queries > 1 or q.dtype != precise):
            # It stores neither a chunk's scores nor K and V in more than 16 bits. In other cases products are faster.
            k, v = (
                self._gathered(name, part, each, pool, options, q.dtype)
                for name, each in (("first", own.keys), ("second", own.values))
            )
            is_seen = seen.hidden.logical_not().expand(b, 1, group, num_queries, width).reshape(b, 1, -1, width)
            q, k, v = (each.view(b, num_kv_heads, -1, each.shape[-1]) for each in (q, k, v))
            result = scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=options.scale)
        else:
            k = self._gathered("first", part, own.keys, pool, options, precise)
            scores = torch.bmm(q.to(precise), k.transpose(1, 2)).mul_(options.scale)
            scores = options.capped(scores).view(b, num_kv_heads, group, num_queries, width)
            scores.masked_fill_(seen.hidden, -torch.inf)
            if options.sinks is not None:
                sinks = options.sinks.to(precise).view(num_kv_heads, group, 1, 1).expand(b, -1, -1, num_queries, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = torch.softmax(scores, -1)[..., :width].contiguous()
            # V takes the memory of K, which is not needed any more, and is in the processor's cache.
            v = self._gathered("first", part, own.values, pool, options, precise)
            result = torch.bmm(weights.view(b * num_kv_heads, -1, width), v).to(q.dtype)
        result = result.view(b, num_kv_heads, group, num_queries, value_size).permute(0, 3, 1, 2, 4)
        out[part.tokens] = result.reshape(-1, queries.shape[1], value_size)

    def _gathered(
        self, name: str, part: Part, entries: AnyEntries, pool: LayeredPool, options: LayerOptions, dtype: torch.dtype
    ) -> Tensor:
        """Return K or V that the part sees, in this dtype: [b * kv heads, L, size]."""
        parts = (self._workspace.gathered(name, each.rows, _rows(part, each, pool, options)) for each in entries.stored)
        return entries.decoded(*parts).to(dtype).view(len(part.sequences) * entries.heads, -1, entries.size)


def _part(step: StepTokens, pool: LayeredPool, chosen: Ints) -> Part:
    """Make the part of these sequences, which all have as many tokens in the step."""
    num_queries = int(step.query_start_loc[chosen[0] + 1] - step.query_start_loc[chosen[0]])
    tokens = step.query_start_loc[chosen][:, None] + np.arange(num_queries)
    return Part(step, chosen, torch.from_numpy(tokens.reshape(-1)).to(pool.device), step.positions[tokens])


def _seen(part: Part, options: LayerOptions, pool: LayeredPool) -> Seen:
    """Return what the part sees by a layer's window and chunk; made once."""
    if options.reach not in part.by_reach:
        size = pool.block_size
        first_seen = options.first_seen(part.positions)
        first = first_seen[:, 0] // size
        width = int((part.positions[:, -1] + 1 - first * size).max())
        columns = first[:, None] + np.arange(-(-width // size))
        context = (first * size)[:, None, None] + np.arange(width)
        is_seen: Bools = (context >= first_seen[:, :, None]) & (context <= part.positions[:, :, None])
        part.by_reach[options.reach] = Seen(
            columns, np.asarray(is_seen.any(1)), torch.from_numpy(~is_seen[:, None, None]).to(pool.device)
        )
    return part.by_reach[options.reach]


def _rows(part: Part, entries: Entries, pool: LayeredPool, options: LayerOptions) -> Tensor:
    """Return the rows to gather, int64 [b * kv heads * L], scratch where no token looks; made once for each layout."""
    key = (options.reach, entries.part, entries.row_steps, entries.heads)
    if key not in part.rows:
        seen = part.by_reach[options.reach]
        steps = entries.row_steps
        rows = part.step.rows_in(part.sequences, seen.columns, entries.part, steps.page, steps.token)[:, : seen.width]
        rows = np.where(seen.used, rows, pool.scratch_block * steps.page)
        heads = np.arange(entries.heads)[:, None] * entries.row_steps.head
        part.rows[key] = torch.from_numpy((rows[:, None] + heads).reshape(-1)).to(pool.device)
    return part.rows[key]


def _buckets(chosen: Ints, lengths: Ints, bytes_per_slot: int) -> list[Ints]:
    """Split sequences by length into as many equal parts as cost least: each is padded to its longest, and a call."""
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
