"""Attention over latents: of each token a layer keeps a few numbers, from which its K and V of all heads are computed whenever they are read (MLA).

What a pass sees is expanded by the model's own function into memory of the pass, in pieces of PIECE positions, each from a multiple of PIECE on, and a
backend attends there as it does anywhere. In the invariant mode each piece is a call of its own, so that the product behind it has one shape always.

Where each token chooses what it attends to (DeepSeek-V3.2's sparse attention, arXiv:2512.02556), it is a sequence of its own: of what it chose, in order of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import AttentionBackend, LayerOptions
from .kv_pool import EntryPlace, KVPlace, LayeredPool, LayerKV
from .layouts.entries import Entries
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
        self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand, chosen: Tensor | None = None
    ) -> Tensor:
        """As a backend's `attend`; what the layer keeps of the pass is in the pool already. `chosen`, integers [T or more, k]: positions that each token
        attends to, in any order; those behind it, and -1, do not count. None: all that `options` let it see."""
        parts = {own.keys.part, own.values.part}
        if chosen is not None:
            step, none = self._step, np.iinfo(np.int64).max
            theirs = chosen[: step.num_tokens].cpu().numpy().astype(np.int64)
            counts = np.count_nonzero(counted := (theirs >= 0) & (theirs <= step.positions[:, None]), axis=1)
            if (counts <= step.positions).any():
                theirs = np.sort(np.where(counted, theirs, none), axis=1)
                return self._attend_chosen(queries, own, replace(options, window=None, chunk=None), expand, theirs, counts)
        if options.reach not in self._seen:
            self._seen[options.reach] = self._made(options, parts)
        return self._attend(queries, own, options, expand, self._seen[options.reach])

    def _attend_chosen(
        self, queries: Tensor, own: LayerKV, options: LayerOptions, expand: Expand, chosen: Ints, counts: Ints
    ) -> Tensor:
        """`chosen`, int64 [T, k]: in row i `counts[i]` positions, rising, and anything behind them."""
        num_tokens = len(chosen)
        at_once = num_tokens if self._backend.is_invariant else max(1, _MOST_CHOSEN // chosen.shape[1])
        found = []
        for first in range(0, num_tokens, at_once):
            tokens = np.arange(first, min(first + at_once, num_tokens))
            stop = len(queries) if tokens[-1] == num_tokens - 1 else first + at_once
            seen = self._made_of(tokens, chosen[tokens], counts[tokens], stop - first - len(tokens), {own.keys.part, own.values.part})
            found.append(self._attend(queries[first:stop], own, options, expand, seen))
        return torch.cat(found)

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
        """[1, heads, tokens, size]."""
        assert isinstance(entries, Entries), "latents are not quantised"
        rows = torch.from_numpy(entries.token_steps.of(slots, self._pool.block_size)).to(self._pool.device)
        return entries.tokens.index_select(0, rows).transpose(0, 1)[None]

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

    def _made_of(self, tokens: Ints, chosen: Ints, counts: Ints, num_padded: int, parts: set[int]) -> _Seen:
        """What these tokens of the pass see, each as a sequence of the `counts[i]` positions that it has chosen."""
        step = self._step
        owners, columns, tables = _pieces(np.zeros_like(counts), counts)
        places = columns[:, None] * PIECE + np.arange(PIECE)
        is_there = places < counts[owners, None]
        positions = np.where(is_there, chosen[owners[:, None], np.minimum(places, chosen.shape[1] - 1)], 0)
        sequences = np.searchsorted(step.query_start_loc, tokens, "right") - 1
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
