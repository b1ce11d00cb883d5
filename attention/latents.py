"""Attention over latents: of each token a layer keeps a few numbers, from which its K and V of all heads are computed whenever they are read (MLA).

What a pass sees is expanded by the model's own function into memory of the pass, in pieces of PIECE positions, each from a multiple of PIECE on, and a
backend attends there as it does anywhere. In the invariant mode each piece is a call of its own, so that the product behind it has one shape always.

Where each token chooses what it attends to (DeepSeek-V3.2's sparse attention, arXiv:2512.02556), it is a sequence of its own: of what it chose, in order of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import AttentionBackend, LayerOptions
from .kv_pool import EntryPlace, KVPlace, LayeredPool, LayerKV
from .layouts.quantised import AnyEntries
from .step_tokens import Bools, Ints, StepTokens

PIECE = 64
_TOGETHER = 16
"""Pieces of one call where bits may depend on them."""
_MOST_CHOSEN = 1 << 14
"""Tokens that those of one call have chosen, at most, if one has not chosen more; in the invariant mode all of a tile are one call."""

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

    def attend(
        self,
        queries: Tensor,
        own: LayerKV,
        options: LayerOptions,
        expand: Expand | None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """As a backend's `attend`; what the layer keeps of the pass is in the pool already. `chosen`, integers [groups, T or more, k]: positions that each
        token attends to, by group of its heads, in any order; those behind it, and -1, do not count. None: all that `options` let it see. Without
        `expand` the layer keeps K and V, of which tokens choose."""
        parts = {own.keys.part, own.values.part}
        if chosen is not None:
            positions = self._step.positions
            theirs = chosen[:, : len(positions)].cpu().numpy().astype(np.int64)
            is_seen = (theirs >= 0) & (theirs <= positions[:, None])
            counts = np.count_nonzero(is_seen, axis=2)
            # Latents of which each token sees all are expanded once for all tokens.
            if expand is None or (counts <= positions).any():
                theirs = np.sort(np.where(is_seen, theirs, np.iinfo(np.int64).max), axis=2)
                return self._attend_chosen(
                    queries, own, replace(options, window=None, chunk=None), expand, theirs, counts
                )
        assert expand is not None, "a layer that keeps K and V of all is a backend's alone"
        if options.reach not in self._seen:
            self._seen[options.reach] = self._made(options, parts)
        return self._attend(queries, own, options, expand, self._seen[options.reach])

    def _attend_chosen(
        self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand | None, chosen: Ints, counts: Ints
    ) -> Tensor:
        """`chosen`, int64 [groups, T, k]: of token i and group g `counts[g, i]` positions, rising, and anything behind them."""
        groups, num_tokens, most = chosen.shape
        at_once = num_tokens if self._backend.is_invariant else max(1, _MOST_CHOSEN // most)
        size, found = queries.shape[1] // groups, list[Tensor]()
        for group in range(groups):
            heads = slice(group * size, (group + 1) * size)
            sinks = None if options.sinks is None else options.sinks[heads]
            first_kept = own.keys.heads * group // groups
            kept = slice(first_kept, first_kept + max(1, own.keys.heads // groups))
            its, parts = expand or partial(_heads, kept), list[Tensor]()
            for first in range(0, num_tokens, at_once):
                tokens = np.arange(first, min(first + at_once, num_tokens))
                stop = len(queries) if tokens[-1] == num_tokens - 1 else first + at_once
                seen = self._made_of(
                    tokens, chosen[group, tokens], counts[group, tokens], stop - first - len(tokens), own
                )
                parts.append(self._attend(queries[first:stop, heads], own, replace(options, sinks=sinks), its, seen))
            found.append(torch.cat(parts))
        return torch.cat(found, dim=1)

    def _attend(self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand, seen: _Seen) -> Tensor:
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
        """[1, heads, tokens, size], in the pool's dtype."""
        size, device = self._pool.block_size, self._pool.device
        stored = [
            each.tokens.index_select(0, torch.from_numpy(each.token_steps.of(slots, size)).to(device))
            for each in entries.stored
        ]
        return entries.transformed(entries.decoded(*stored)).to(self._pool.dtype).transpose(0, 1)[None]

    def _made(self, options: LayerOptions, parts: set[int]) -> _Seen:
        step = self._step
        first_tokens = step.query_start_loc[:-1]
        firsts = options.first_seen(step.positions[first_tokens]) // PIECE
        sequences, columns, tables = _pieces(firsts, step.seq_lens)
        positions = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = (positions < step.seq_lens[sequences, None]) & (
            positions >= options.first_seen(step.positions[first_tokens])[sequences, None]
        )
        slots = {part: self._slots(sequences, positions, is_there, part) for part in parts}
        return _Seen(len(columns), slots, replace(step, block_tables=tables, block_size=PIECE), {})

    def _made_of(self, tokens: Ints, chosen: Ints, counts: Ints, num_padded: int, own: LayerKV) -> _Seen:
        """What these tokens of the pass see, each as a sequence of the `counts[i]` positions that it has chosen."""
        step = self._step
        owners, columns, tables = _pieces(np.zeros_like(counts), counts)
        places = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = places < counts[owners, None]
        positions = np.where(is_there, chosen[owners[:, None], np.minimum(places, chosen.shape[1] - 1)], 0)
        sequences = np.searchsorted(step.query_start_loc, tokens, "right") - 1
        parts = {own.keys.part, own.values.part}
        slots = {part: self._slots(sequences[owners], positions, is_there, part) for part in parts}
        nowhere = np.full_like(tokens, -1)
        starts = np.arange(len(tokens) + 1)
        its = StepTokens(counts - 1, nowhere, starts, counts, tables, PIECE, num_padded)
        return _Seen(len(columns), slots, its, {})

    def _slots(self, sequences: Ints, positions: Ints, is_there: Bools, part: int) -> Ints:
        """int64 [pieces * PIECE]: by the tables of a sequence a piece, where the latents of these positions are, [pieces, PIECE] both."""
        size, table = self._pool.block_size, self._step.table(part)
        within = np.minimum(positions // size, table.shape[1] - 1)
        of_tables = table[sequences[:, None], within].astype(np.int64) * size + positions % size
        slots: Ints = np.where(is_there, of_tables, self._pool.scratch_slot).reshape(-1)
        return slots

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


def _heads(kept: slice, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """These heads alone of K and V, [1, heads, tokens, size] each."""
    return keys[:, kept], values[:, kept]


def _pieces(firsts: Ints, lengths: Ints) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Of sequences of so many tokens, seen from piece `firsts[i]` on: the sequence and the column of each piece, one sequence after the other, and block
    tables that name them so."""
    counts = -(-lengths // PIECE) - firsts
    total = int(counts.sum())
    sequences = np.arange(len(lengths)).repeat(counts)
    columns = np.arange(total) - (counts.cumsum() - counts - firsts).repeat(counts)
    tables = np.full((len(lengths), int(columns.max(initial=0)) + 1), -1, np.int32)
    tables[sequences, columns] = np.arange(total)
    return sequences, columns, tables
