"""Attention by gathering K and V through the block tables into a workspace, and torch's own scaled dot product on that.

Runs wherever torch does. Sequences with one token are sorted by length and go in a few buckets, each padded to its longest;
a chunk goes by itself. What is padded or out of a layer's window is read from the scratch block, so that nobody multiplies what a
freed block holds, even by 0. With `is_invariant` it works in fixed pieces instead (`pieces.py`): slower, and the same to the last
bit whatever else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import pieces
from attention.backend import LayerOptions, LayerShape, working_dtype
from attention.kv_pool import KVPool
from attention.step_tokens import Ints, StepTokens
from attention.workspace import Workspace

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
    seen        bool [b, q, L] for branches, else None: what lies before
    """

    tokens: Tensor
    slots: NDArray[np.int64]
    context_positions: NDArray[np.int64]
    positions: NDArray[np.int64]
    seen: NDArray[np.bool_] | None
    by_window: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """The parts of one step."""

    parts: list[Part]


class Backend:
    """See the module."""

    name = "torch_gather"

    def __init__(self, is_invariant: bool) -> None:
        self.is_invariant = is_invariant
        self._workspace = Workspace()

    def check(self, shape: LayerShape) -> None:
        """It can do every shape."""

    def prepare(self, step: StepTokens, pool: KVPool) -> Plan | pieces.Plan:
        """Sort the sequences into parts."""
        if self.is_invariant:
            return pieces.prepare(step, pool)
        counts = np.diff(step.starts)
        bytes_per_slot = 2 * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize
        single = ((counts == 1) & (step.ancestors is None)).nonzero()[0]
        parts = [
            self._bucket(step, pool, bucket) for bucket in _buckets(single, step.context_lens[single], bytes_per_slot)
        ]
        for i in np.setdiff1d(np.arange(step.num_sequences), single).tolist():
            parts.append(self._chunk(step, pool, i))
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
        lengths = step.context_lens[chosen]
        width = int(lengths.max())
        rising = np.arange(width)
        slots = step.slots_by_column(width, chosen)
        tokens = step.starts[chosen]
        return Part(
            torch.from_numpy(tokens).to(pool.device),
            slots,
            np.where(rising < lengths[:, None], rising, -1),
            step.positions[tokens][:, None],
            None,
        )

    def _chunk(self, step: StepTokens, pool: KVPool, i: int) -> Part:
        first, stop = int(step.starts[i]), int(step.starts[i + 1])
        history = step.history(i)
        context_positions = np.concatenate([np.arange(len(history)), step.positions[first:stop]])
        seen = None
        if step.ancestors is not None:
            seen = np.ones((1, stop - first, len(context_positions)), np.bool_)
            seen[0, :, len(history) :] = step.ancestors[first:stop, first:stop]
        return Part(
            torch.arange(first, stop, device=pool.device),
            np.concatenate([history, step.slot_mapping[first:stop]])[None],
            context_positions[None],
            step.positions[None, first:stop],
            seen,
        )

    def _attend_part(
        self, queries: Tensor, out: Tensor, pool: KVPool, layer: int, part: Part, options: LayerOptions
    ) -> None:
        num_kv_heads, head_dim = pool.num_kv_heads, pool.head_dim
        group = queries.shape[1] // num_kv_heads
        (b, num_queries), width = part.positions.shape, part.slots.shape[1]
        slots, seen = _slots_and_mask(part, options.window, pool)
        keys, values = pool.slots(layer)
        k = self._workspace.gathered("keys", keys, slots).view(b, width, num_kv_heads, head_dim)
        v = self._workspace.gathered("values", values, slots).view(b, width, num_kv_heads, head_dim)
        # The heads of a group read the same K and V, so they stand beside the queries: [b, kv heads, group * queries, head_dim].
        q = queries[part.tokens].view(b, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(b, num_kv_heads, group * num_queries, head_dim)
        mask = seen[:, None].expand(b, group, num_queries, width).reshape(b, 1, group * num_queries, width)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if options.soft_cap is None:
            result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale)
        else:
            scores = options.capped(torch.matmul(q, k.transpose(2, 3)).to(working_dtype(q.dtype)) * options.scale)
            result = torch.matmul(torch.softmax(scores.masked_fill(~mask, -torch.inf), -1).to(v.dtype), v)
        result = result.view(b, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        out[part.tokens] = result.reshape(-1, queries.shape[1], head_dim)


def _buckets(chosen: Ints, lengths: Ints, bytes_per_slot: int) -> list[Ints]:
    """The sequences by length, in as many even parts as cost least: each padded to its longest, and a call for each."""
    if not len(chosen):
        return []
    by_length = np.argsort(lengths, kind="stable")
    rising = lengths[by_length]

    def cost(count: int) -> int:
        num_slots = sum(len(part) * int(part[-1]) for part in np.array_split(rising, count))
        return num_slots * bytes_per_slot + count * _BYTES_A_CALL

    count = min((each for each in _BUCKETS if each <= len(rising)), key=cost)
    return cast("list[Ints]", np.array_split(chosen[by_length], count))


def _slots_and_mask(part: Part, window: int | None, pool: KVPool) -> tuple[Tensor, Tensor]:
    """Slots, int64 [b * L], scratch where no query looks, and what each query sees, bool [b, q, L]; made once a window."""
    if window not in part.by_window:
        context, positions = part.context_positions[:, None, :], part.positions[:, :, None]
        seen = (context >= 0) & (context <= positions if part.seen is None else part.seen)
        if window is not None:
            seen = seen & (context > positions - window)
        slots = np.where(seen.any(1), part.slots, pool.scratch_slot)
        part.by_window[window] = (
            torch.from_numpy(slots.reshape(-1)).to(pool.device),
            torch.from_numpy(seen).to(pool.device),
        )
    return part.by_window[window]
