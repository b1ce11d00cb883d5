"""Attention over latents: of each token a layer keeps a few numbers, from which its K and V of all heads are computed whenever they are read (MLA).

What a pass sees is expanded by the model's own function into memory of the pass, in pieces of PIECE positions, each from a multiple of PIECE on, and a
backend attends there as it does anywhere. In the invariant mode each piece is a call of its own, so that the product behind it has one shape always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backend import AttentionBackend, LayerOptions
from .kv_pool import EntryPlace, KVPlace, LayeredPool, LayerKV
from .layouts.entries import Entries
from .layouts.quantised import AnyEntries
from .step_tokens import Ints, StepTokens

PIECE = 64
_TOGETHER = 16
"""Pieces of one call where bits may depend on them."""

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Two latents of tokens, [1, 1, tokens, size] each, to K and V, [1, heads, tokens, size]."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a pass sees by one window and chunk: so many pieces.

    slots  int64 [pieces * PIECE] by page of a block: where their latents are, the scratch block's behind a sequence's end
    step   the pass with a block for each piece
    plans  what the backend made of it, by the memory that holds the pieces
    """

    num_pieces: int
    slots: dict[int, Ints]
    step: StepTokens
    plans: dict[int, Any]


class Latents:
    """The latents that one pass sees through one group's tables. `room` is kept from pass to pass: memory for what they expand to."""

    def __init__(
        self, step: StepTokens, pool: LayeredPool, backend: AttentionBackend, room: dict[Any, LayeredPool]
    ) -> None:
        self._step, self._pool, self._backend, self._room = step, pool, backend, room
        self._seen: dict[Any, _Seen] = {}

    def attend(self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand) -> Tensor:
        """As a backend's `attend`; what the layer keeps of the pass is in the pool already."""
        if options.reach not in self._seen:
            self._seen[options.reach] = self._made(options, {own.keys.part, own.values.part})
        seen = self._seen[options.reach]
        together = 1 if self._backend.is_invariant else _TOGETHER
        room: LayeredPool | None = None
        for first in range(0, seen.num_pieces, together):
            stop = min(first + together, seen.num_pieces)
            its = slice(first * PIECE, stop * PIECE)
            latents = [self._latents(each, seen.slots[each.part][its]) for each in (own.keys, own.values)]
            keys, values = (each[0].transpose(0, 1) for each in expand(*latents))
            room = room or self._room_for(seen.num_pieces, keys, values)
            for blocks, new in ((room.keys(0), keys), (room.values(0), values)):
                blocks[first:stop] = new.reshape(-1, PIECE, *new.shape[1:])
        assert room is not None, "a pass has tokens, and they see themselves"
        if id(room) not in seen.plans:
            seen.plans[id(room)] = self._backend.prepare(seen.step, room)
        return self._backend.attend(queries, room, 0, seen.plans[id(room)], options)

    def _latents(self, entries: AnyEntries, slots: Ints) -> Tensor:
        """[1, heads, tokens, size]."""
        assert isinstance(entries, Entries), "latents are not quantised"
        rows = torch.from_numpy(entries.token_steps.of(slots, self._pool.block_size)).to(self._pool.device)
        return entries.tokens.index_select(0, rows).transpose(0, 1)[None]

    def _made(self, options: LayerOptions, parts: set[int]) -> _Seen:
        step = self._step
        first_tokens = step.query_start_loc[:-1]
        firsts = options.first_seen(step.positions[first_tokens]) // PIECE
        counts = -(-step.seq_lens // PIECE) - firsts
        total = int(counts.sum())
        sequences = np.arange(step.num_sequences).repeat(counts)
        columns = np.arange(total) - (counts.cumsum() - counts - firsts).repeat(counts)
        tables = np.full((step.num_sequences, int(columns.max(initial=0)) + 1), -1, np.int32)
        tables[sequences, columns] = np.arange(total)
        positions = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = (positions < step.seq_lens[sequences, None]) & (
            positions >= options.first_seen(step.positions[first_tokens])[sequences, None]
        )
        size = self._pool.block_size
        slots = {}
        for part in parts:
            table = step.table(part)
            within = np.minimum(positions // size, table.shape[1] - 1)
            of_tables = table[sequences[:, None], within].astype(np.int64) * size + positions % size
            slots[part] = np.where(is_there, of_tables, self._pool.scratch_slot).reshape(-1)
        expanded = replace(step, block_tables=tables, block_size=PIECE)
        return _Seen(total, slots, expanded, {})

    def _room_for(self, num_pieces: int, keys: Tensor, values: Tensor) -> LayeredPool:
        """Memory for so many pieces of K and V, [tokens, heads, size] each."""
        key = (keys.shape[1:], values.shape[1:], keys.dtype)
        room = self._room.get(key)
        if room is None or room.num_blocks < num_pieces:
            unit = PIECE * keys.shape[1] * keys.shape[2] * keys.dtype.itemsize
            places = KVPlace(0, EntryPlace(0, 0, *keys.shape[1:]), EntryPlace(0, unit, *values.shape[1:]))
            more = PIECE * values.shape[1] * values.shape[2] * values.dtype.itemsize
            # Not two of them at once.
            self._room.pop(key, None)
            room = self._room[key] = LayeredPool(
                {0: places},
                num_blocks=num_pieces * 3 // 2 + 1,
                page_bytes=unit + more,
                block_size=PIECE,
                dtype=keys.dtype,
                device=keys.device,
            )
        return room
