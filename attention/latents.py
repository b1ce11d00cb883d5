"""Attention over latents (MLA): a layer keeps a few numbers a token, and computes K and V of all heads at each read.

The model's own function expands the latents that a pass sees into memory of the pass, in pieces that begin at multiples
of PIECE positions. A backend attends there. In the invariant mode each piece is a call, so products have one shape.

If tokens choose what they attend to (DeepSeek-V3.2, arXiv:2512.02556), each is a sequence of the positions it chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import AttentionBackend, LayerOptions
from .kv_pool import EntryPlace, KVPlace, LayeredPool, LayerKV
from .step_tokens import Bools, Ints, StepTokens

PIECE = 64
_TOGETHER = 16
"""Pieces that one call expands, outside the invariant mode."""
_MOST_CHOSEN = 1 << 14
"""Chosen positions of all tokens in a call, at most, or those of one; in the invariant mode a tile is one call."""
_APART = 8
"""In the invariant mode a token from position _APART * k on has its k chosen positions expanded for it alone. Below,
one expansion for the 32 tokens of a tile is cheaper."""

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From two latents, [1, 1, tokens, size] each, to K and V, [1, heads, tokens, size] each."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a pass sees by one window and chunk, as pieces.

    slots  int64 [pieces * PIECE] by page of a block: where the latents are; behind a sequence's end the scratch block's
    step   the pass, with tables into the memory of the pieces
    plans  the backend's plan, by the memory that holds the pieces
    """

    num_pieces: int
    slots: dict[int, Ints]
    step: StepTokens
    plans: WeakKeyDictionary[LayeredPool, Any] = field(default_factory=WeakKeyDictionary)


class Latents:
    """The latents that one pass sees through one group's tables. `room`: memory for K and V, kept from pass to pass."""

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
        """Attend as a backend does; what the layer keeps of the pass's own tokens is in the pool already.

        chosen  integers [groups, T or more, k]: the positions that each token attends to, by group of query heads, in
                any order; -1 and positions behind the token are ignored. None: all that `options` let it see
        expand  None: the layer keeps K and V themselves, and `chosen` is given
        """
        if chosen is not None:
            positions = self._step.positions
            theirs = chosen[:, : len(positions)].cpu().numpy().astype(np.int64)
            is_seen = (theirs >= 0) & (theirs <= positions[:, None])
            counts = np.count_nonzero(is_seen, axis=2)
            # If each token chose all that it may see, one expansion serves all tokens.
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
        """Attend to the first `counts[g, i]` positions, rising, of `chosen[g, i]`, int64 [groups, T, k]."""
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
        """Attend with each token as a sequence of what it chose; `chosen` is int64 [T, k], `counts` int64 [T]."""
        num_tokens, most = chosen.shape
        if self._backend.is_invariant:
            # It depends on the token alone, so bits do, too. Both calls have all places; unused ones see one token.
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
        if room not in seen.plans:
            seen.plans[room] = self._backend.prepare(seen.step, room)
        return self._backend.attend(queries, room, 0, seen.plans[room], options)

    def _all_of(self, options: LayerOptions, own: LayerKV) -> _Seen:
        """Return all that the pass sees by a window and chunk, for latents on these pages; made once."""
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
        self._seen[key] = _Seen(len(columns), slots, replace(step, block_tables=tables, block_size=PIECE))
        return self._seen[key]

    def _together(self, chosen: Ints, counts: Ints, num_padded: int, own: LayerKV) -> _Seen:
        """Return each token as a sequence of its chosen positions, one a block, in one expansion of all."""
        whole = self._all_of(LayerOptions(1.0), own)
        sequences = np.arange(self._step.num_sequences).repeat(np.diff(self._step.query_start_loc))
        positions = np.where(np.arange(chosen.shape[1]) < counts[:, None], chosen, chosen[:, :1])
        pieces = whole.step.block_tables[sequences[:, None], positions // PIECE]
        tables = (pieces * PIECE + positions % PIECE).astype(np.int32)
        return _Seen(whole.num_pieces, whole.slots, _as_sequences(counts, tables, 1, num_padded))

    def _apart(self, tokens: Ints, chosen: Ints, counts: Ints, num_padded: int, own: LayerKV) -> _Seen:
        """Return these tokens as sequences of their chosen positions, each in pieces of its own."""
        step = self._step
        owners, columns, tables = _pieces(np.zeros_like(counts), counts)
        places = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = places < counts[owners, None]
        positions = np.where(is_there, chosen[owners[:, None], np.minimum(places, chosen.shape[1] - 1)], 0)
        sequences = np.searchsorted(step.query_start_loc, tokens, "right") - 1
        parts = {own.keys.part, own.values.part}
        slots = {part: self._slots(sequences[owners], positions, is_there, part) for part in parts}
        return _Seen(len(columns), slots, _as_sequences(counts, tables, PIECE, num_padded))

    def _slots(self, sequences: Ints, positions: Ints, is_there: Bools, part: int) -> Ints:
        """Return the slots of positions, [pieces, PIECE], by each piece's sequence: int64 [pieces * PIECE]."""
        size, table = self._pool.block_size, self._step.table(part)
        within = np.minimum(positions // size, table.shape[1] - 1)
        of_tables = table[sequences[:, None], within].astype(np.int64) * size + positions % size
        slots: Ints = np.where(is_there, of_tables, self._pool.scratch_block * size).reshape(-1)
        return slots

    def _room_for(self, num_tokens: int, block_size: int, keys: Tensor, values: Tensor) -> LayeredPool:
        """Return memory for K and V, shaped as these ([tokens, heads, size]), of so many tokens in such blocks."""
        key = (keys.shape[1:], values.shape[1:], keys.dtype, block_size)
        room, num_blocks = self._room.get(key), num_tokens // block_size
        if room is None or room.num_blocks < num_blocks:
            unit, more = (block_size * each[0].numel() * each.dtype.itemsize for each in (keys, values))
            places = KVPlace(0, EntryPlace(0, 0, *keys.shape[1:]), EntryPlace(0, unit, *values.shape[1:]))
            # Free the old memory before the new one is made.
            self._room.pop(key, None)
            del room
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
    """Return these heads of K and V, [1, heads, tokens, size] each."""
    return keys[:, kept], values[:, kept]


def _as_sequences(counts: Ints, tables: NDArray[np.int32], block_size: int, num_padded: int) -> StepTokens:
    """Return a step with one token a sequence, the last of its `counts[i]` tokens."""
    nowhere, starts = np.full_like(counts, -1), np.arange(len(counts) + 1)
    return StepTokens(counts - 1, nowhere, starts, counts, tables, block_size, num_padded)


def _pieces(firsts: Ints, lengths: Ints) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Return the pieces of sequences of such lengths from piece `firsts[i]` on, one sequence after the other: the
    sequence and the column of each, and block tables that number them."""
    counts = -(-lengths // PIECE) - firsts
    total = int(counts.sum())
    sequences = np.arange(len(lengths)).repeat(counts)
    columns = np.arange(total) - (counts.cumsum() - counts - firsts).repeat(counts)
    tables = np.full((len(lengths), int(columns.max(initial=0)) + 1), -1, np.int32)
    tables[sequences, columns] = np.arange(total)
    return sequences, columns, tables
