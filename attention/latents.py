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
from .step_tokens import Bools, Ints, StepTokens

PIECE = 64
_TOGETHER = 16
"""Pieces of one call where bits may depend on them."""
_MOST_CHOSEN = 1 << 14
"""Tokens that those of one call have chosen, at most, if one has not chosen more; in the invariant mode all of a tile are one call."""
_APART = 8
"""Where a token can see so many times what it chooses, what it has chosen is expanded for it alone: 32 tokens of a tile would else be cheaper together."""

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
        return self._attend(queries, own, options, expand, self._all_of(options, own))

    def _attend_chosen(
        self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand | None, chosen: Ints, counts: Ints
    ) -> Tensor:
        """`chosen`, int64 [groups, T, k]: of token i and group g `counts[g, i]` positions, rising, and anything behind them."""
        groups = len(chosen)
        size, found = queries.shape[1] // groups, list[Tensor]()
        for group, its, num in zip(range(groups), chosen, counts, strict=True):
            heads = slice(group * size, (group + 1) * size)
            sinks = None if options.sinks is None else options.sinks[heads]
            first = own.keys.heads * group // groups
            both = expand or partial(_heads, slice(first, first + max(1, own.keys.heads // groups)))
            given = queries[:, heads], own, replace(options, sinks=sinks), both
            found.append(self._attend_as_sequences(*given, its, num))
        return torch.cat(found, dim=1)

    def _attend_as_sequences(
        self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand, chosen: Ints, counts: Ints
    ) -> Tensor:
        """Each token is a sequence of what it chose, int64 [T, k] and [T]. All that tokens see is expanded once, or what each has chosen for itself."""
        num_tokens, most = chosen.shape
        if self._backend.is_invariant:
            # A rule of the token alone, so that bits are. Every call has all places; those of the other rule see one token.
            is_apart = self._step.positions >= _APART * most
        else:
            is_apart = np.full(num_tokens, int(counts.sum()) < int(self._step.seq_lens.sum()))
        found = queries.new_zeros(())
        if not is_apart.all():
            seen = self._together(chosen, np.where(is_apart, 1, counts), len(queries) - num_tokens, own)
            found = self._attend(queries, own, options, expand, seen)
        if is_apart.any():
            numbers, parts = np.where(is_apart, counts, 1), list[Tensor]()
            at_once = num_tokens if self._backend.is_invariant else max(1, _MOST_CHOSEN // most)
            for first in range(0, num_tokens, at_once):
                tokens = np.arange(first, min(first + at_once, num_tokens))
                stop = len(queries) if tokens[-1] == num_tokens - 1 else first + at_once
                seen = self._apart(tokens, chosen[tokens], numbers[tokens], stop - first - len(tokens), own)
                parts.append(self._attend(queries[first:stop], own, options, expand, seen))
            is_its = torch.from_numpy(np.pad(is_apart, (0, len(queries) - num_tokens), mode="edge")).to(queries.device)
            found = torch.cat(parts).where(is_its[:, None, None], found)
        return found

    def _attend(self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand, seen: _Seen) -> Tensor:
        together = 1 if self._backend.is_invariant else _TOGETHER
        room: LayeredPool | None = None
        for first in range(0, seen.num_pieces, together):
            stop = min(first + together, seen.num_pieces)
            its = slice(first * PIECE, stop * PIECE)
            kept = [self._pool.read(each, seen.slots[each.part][its]) for each in (own.keys, own.values)]
            keys, values = (each[0].transpose(0, 1) for each in expand(*(each.transpose(0, 1)[None] for each in kept)))
            size = seen.step.block_size
            room = room or self._room_for(seen.num_pieces * PIECE, size, keys, values)
            for blocks, new in ((room.keys(0), keys), (room.values(0), values)):
                blocks[first * PIECE // size : stop * PIECE // size] = new.reshape(-1, size, *new.shape[1:])
        assert room is not None, "a pass has tokens, and they see themselves"
        if id(room) not in seen.plans:
            seen.plans[id(room)] = self._backend.prepare(seen.step, room)
        return self._backend.attend(queries, room, 0, seen.plans[id(room)], options)

    def _all_of(self, options: LayerOptions, own: LayerKV) -> _Seen:
        """All that the pass sees by a window and chunk, where a layer keeps it."""
        parts = {own.keys.part, own.values.part}
        key = options.reach, *sorted(parts)
        if key in self._seen:
            return self._seen[key]
        step = self._step
        first_tokens = step.query_start_loc[:-1]
        firsts = options.first_seen(step.positions[first_tokens]) // PIECE
        sequences, columns, tables = _pieces(firsts, step.seq_lens)
        positions = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = (positions < step.seq_lens[sequences, None]) & (
            positions >= options.first_seen(step.positions[first_tokens])[sequences, None]
        )
        slots = {part: self._slots(sequences, positions, is_there, part) for part in parts}
        self._seen[key] = _Seen(len(columns), slots, replace(step, block_tables=tables, block_size=PIECE), {})
        return self._seen[key]

    def _together(self, chosen: Ints, counts: Ints, num_padded: int, own: LayerKV) -> _Seen:
        """All that the pass sees, and of it what each token sees, as a sequence of the `counts[i]` positions that it has chosen, a block each."""
        whole = self._all_of(LayerOptions(1.0), own)
        sequences = np.arange(self._step.num_sequences).repeat(np.diff(self._step.query_start_loc))
        positions = np.where(np.arange(chosen.shape[1]) < counts[:, None], chosen, chosen[:, :1])
        pieces = whole.step.block_tables[sequences[:, None], positions // PIECE]
        tables = (pieces * PIECE + positions % PIECE).astype(np.int32)
        return _Seen(whole.num_pieces, whole.slots, _as_sequences(counts, tables, 1, num_padded), {})

    def _apart(self, tokens: Ints, chosen: Ints, counts: Ints, num_padded: int, own: LayerKV) -> _Seen:
        """What these tokens of the pass see, each in pieces of its own."""
        step = self._step
        owners, columns, tables = _pieces(np.zeros_like(counts), counts)
        places = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = places < counts[owners, None]
        positions = np.where(is_there, chosen[owners[:, None], np.minimum(places, chosen.shape[1] - 1)], 0)
        sequences = np.searchsorted(step.query_start_loc, tokens, "right") - 1
        parts = {own.keys.part, own.values.part}
        slots = {part: self._slots(sequences[owners], positions, is_there, part) for part in parts}
        return _Seen(len(columns), slots, _as_sequences(counts, tables, PIECE, num_padded), {})

    def _slots(self, sequences: Ints, positions: Ints, is_there: Bools, part: int) -> Ints:
        """int64 [pieces * PIECE]: by the tables of a sequence a piece, where the latents of these positions are, [pieces, PIECE] both."""
        size, table = self._pool.block_size, self._step.table(part)
        within = np.minimum(positions // size, table.shape[1] - 1)
        of_tables = table[sequences[:, None], within].astype(np.int64) * size + positions % size
        slots: Ints = np.where(is_there, of_tables, self._pool.scratch_slot).reshape(-1)
        return slots

    def _room_for(self, num_tokens: int, block_size: int, keys: Tensor, values: Tensor) -> LayeredPool:
        """Memory for K and V of so many tokens, [tokens, heads, size] each, in blocks of so many."""
        key = (keys.shape[1:], values.shape[1:], keys.dtype, block_size)
        room, num_blocks = self._room.get(key), num_tokens // block_size
        if room is None or room.num_blocks < num_blocks:
            unit, more = (block_size * each[0].numel() * each.dtype.itemsize for each in (keys, values))
            places = KVPlace(0, EntryPlace(0, 0, *keys.shape[1:]), EntryPlace(0, unit, *values.shape[1:]))
            # Not two of them at once.
            self._room.pop(key, None)
            room = self._room[key] = LayeredPool(
                {0: places},
                num_blocks=num_blocks * 3 // 2 + 1,
                page_bytes=unit + more,
                block_size=block_size,
                dtype=keys.dtype,
                device=keys.device,
            )
        return room


def _heads(kept: slice, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """These heads alone of K and V, [1, heads, tokens, size] each."""
    return keys[:, kept], values[:, kept]


def _as_sequences(counts: Ints, tables: NDArray[np.int32], block_size: int, num_padded: int) -> StepTokens:
    """The last token of each of so many sequences of `counts[i]` tokens."""
    nowhere, starts = np.full_like(counts, -1), np.arange(len(counts) + 1)
    return StepTokens(counts - 1, nowhere, starts, counts, tables, block_size, num_padded)


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
