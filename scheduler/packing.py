"""A decided step as the arrays that a model runner needs. Decides nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import GrowingView, rising, rising_from
from paged.block_manager import Composed, Moves
from paged.block_manager.moves import NO_MOVES, joined

from .batch import NO_LOADS, Batch, Ticket
from .composition import ones
from .rows import Rows
from .state import State, Step

_ALL_TRUE = GrowingView(lambda length: np.ones(length, np.bool_))
_ALL_ZERO = GrowingView(lambda length: np.zeros(length, np.int64))
_NOWHERE = GrowingView(lambda length: np.full(length, -1, np.int64))
_NO_VALUE = GrowingView(lambda length: np.full(length, -1, np.int32))
Counts = NDArray[np.int64]


def _extended(values: Counts, length: int) -> Counts:
    """The same with -1 behind, `length` in all."""
    longer = np.full(length, -1, np.int64)
    longer[: len(values)] = values
    return longer


def _copies_of(step: Step) -> tuple[NDArray[np.int32], Moves]:
    """The loads and the moves of a step, read-only: a cancel carries them over as they are."""
    loads, moves = np.array(step.loads, np.int32).reshape(-1, 3), joined(step.moves)
    for carried in (loads, moves.device_to_host, moves.host_to_device, moves.device_to_device):
        carried.flags.writeable = False
    return loads, moves


class _Packed(NamedTuple):
    """Rows and tokens of a batch, decodes first, as `Batch` has them. `counts` are num_tokens, and `start_loc` query_start_loc."""

    rows: Rows
    counts: Counts
    start_loc: Counts
    seq_lens: Counts
    token_ids: NDArray[np.int32]
    batches: Counts
    places: Counts
    positions: Counts
    slots: Counts
    samples: NDArray[np.bool_]
    num_samples: int


class Packer:
    """Builds batches; remembers whose rows the last one had, because in a steady stretch they stay the same."""

    def __init__(self) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._ids: NDArray[np.object_] = np.empty(0, object)
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)

    def pack(self, state: State, step: Step, owner: object) -> Batch:
        """The batch of this step; its rows are placed already."""
        starts, decode_counts = step.decode_starts, None
        has_more = bool(state.pending_outputs or step.loads or any(len(moves) for moves in step.moves))
        if step.draft_counts is not None:
            decode_counts = step.draft_counts + 1
            starts = rising_from(starts, decode_counts)
        composed = state.manager.commit(step.decodes, starts, decode_counts, state.now, has_more=has_more)
        if len(composed.moves):
            step.moves.append(composed.moves)
        packed = self._decodes(state, step, composed, starts, counts=decode_counts)
        if step.chunks:
            packed = self._with_chunks(state, step, composed, packed)
        rows, samples, num_samples = packed.rows, packed.samples, packed.num_samples
        if state.silent:
            samples = samples & ~np.isin(rows, list(state.silent))
            num_samples = int(np.count_nonzero(samples))
            samples.flags.writeable = False
        covers_running = state.running_rows.keep(step.decodes, [chunk[0] for chunk in step.chunks], rows)
        if not covers_running:
            state.columns.advance_unevenly()
        if rows is not self._rows:
            self._name(state, rows)
        packed.counts.flags.writeable = False
        num_drafts = _ALL_ZERO.first(len(rows))
        if step.draft_counts is not None:
            num_drafts = np.zeros(len(rows), np.int64)
            num_drafts[: len(step.decodes)] = step.draft_counts
            num_drafts.flags.writeable = False
        loads, moves = _copies_of(step) if step.loads or step.moves else (NO_LOADS, NO_MOVES)
        changes = composed.changes
        return Batch(
            number=composed.number,
            rows=rows.copy(),
            num_tokens=packed.counts,
            query_start_loc=packed.start_loc,
            token_ids=packed.token_ids,
            source_batches=packed.batches,
            source_places=packed.places,
            positions=packed.positions,
            slot_mapping=packed.slots,
            seq_lens=packed.seq_lens.copy() if step.draft_counts is None else packed.seq_lens + num_drafts,
            samples=samples,
            num_drafts=num_drafts,
            ids=self._ids,
            sequences=self._sequences,
            block_tables=composed.block_tables,
            table_rows=changes.rows,
            table_columns=changes.columns,
            table_blocks=changes.blocks,
            moves=moves,
            loads=loads,
            ticket=Ticket(
                owner,
                rows,
                packed.seq_lens,
                samples,
                num_samples,
                covers_running,
                composed.flight is None,
                composed.flight,
                None if step.draft_counts is None else num_drafts,
                step.draft_tokens,
                {},
                {},
            ),
            has_outputs=bool(state.pending_outputs),
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
        )

    def _name(self, state: State, rows: Rows) -> None:
        """Remember which request, and which sequence of it, each of these rows serves."""
        self._rows = rows
        self._ids = state.columns.id[rows]
        self._ids.setflags(write=False)
        if state.columns.num_later:
            self._sequences = state.columns.sequence[rows]
            self._sequences.setflags(write=False)
        else:
            self._sequences = _ALL_ZERO.first(len(rows))

    def _decodes(
        self, state: State, step: Step, composed: Composed, starts: Counts, *, counts: Counts | None
    ) -> _Packed:
        """The rows that decode, `counts` tokens of each (None: its last one), drafts among them, whose positions `starts` are."""
        count, tokens = len(step.decodes), composed.last_tokens
        batches = places = _NOWHERE.first(count)
        bounds, samples = rising(count + 1), _ALL_TRUE.first(count)
        if state.outstanding.batches and count:
            tokens, batches, places = self._await(state, step, tokens)
        if counts is None:
            counts = ones(count)
        else:
            bounds = np.zeros(count + 1, np.int64)
            np.cumsum(counts, out=bounds[1:])
            begins = bounds[:-1]
            tokens = self._before_drafts(tokens, begins, step.draft_tokens)
            batches, places = self._spread(batches, begins, len(starts)), self._spread(places, begins, len(starts))
        positions = starts if step.chunks else starts.copy()
        lengths = step.decode_ends
        return _Packed(
            step.decodes, counts, bounds, lengths, tokens, batches, places, positions, composed.slots, samples, count
        )

    def _with_chunks(self, state: State, step: Step, composed: Composed, decodes: _Packed) -> _Packed:
        """The same, and behind the decodes the chunks of prompts."""
        manager, size, tokens = state.manager, state.manager.block_size, composed.tokens
        num_decodes, start = len(decodes.rows), len(decodes.token_ids)
        num_rows, num_tokens = num_decodes + len(step.chunks), start + sum([chunk[2] for chunk in step.chunks])
        rows, seq_lens = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
        counts, start_loc = np.empty(num_rows, np.int64), np.empty(num_rows + 1, np.int64)
        token_ids, positions = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int64)
        slots = np.empty(num_tokens, np.int64)
        rows[:num_decodes], seq_lens[:num_decodes] = decodes.rows, decodes.seq_lens
        counts[:num_decodes], start_loc[: num_decodes + 1] = decodes.counts, decodes.start_loc
        token_ids[:start], positions[:start], slots[:start] = decodes.token_ids, decodes.positions, decodes.slots
        batches, places = _extended(decodes.batches, num_tokens), _extended(decodes.places, num_tokens)
        chunk_slots, place = self._chunk_slots(composed.block_tables, size, step.chunks), 0
        partial = []
        numbers = rising(max(tokens.shape[1], *[first + count for _, first, count, _ in step.chunks]))
        for i, (row, first, count, is_last) in enumerate(step.chunks, num_decodes):
            end, stop, skipped = first + count, start + count, first % size
            rows[i], counts[i], seq_lens[i], start_loc[i + 1] = row, count, end, stop
            known = manager.rows.num_tokens.item(row) if state.outstanding.batches else end
            if known < end:
                self._await_chunk(state, (row, first, end, start), token_ids, batches, places)
            token_ids[start : start + max(min(known, end) - first, 0)] = tokens[row, first : min(known, end)]
            positions[start:stop] = numbers[first:end]
            slots[start:stop] = chunk_slots[place + skipped : place + skipped + count]
            place += -(-(skipped + count) // size) * size
            start = stop
            if not is_last:
                partial.append(i)
        samples = _ALL_TRUE.first(num_rows)
        if partial:
            samples = samples.copy()
            samples[partial] = False
            samples.flags.writeable = False
        num_samples = num_rows - len(partial)
        return _Packed(
            rows, counts, start_loc, seq_lens, token_ids, batches, places, positions, slots, samples, num_samples
        )

    def _before_drafts(
        self, tokens: NDArray[np.int32], begins: Counts, drafts: NDArray[np.int32] | None
    ) -> NDArray[np.int32]:
        """Each row's last token, where the row begins, and its drafts behind it."""
        assert drafts is not None, "there are drafts"
        packed = np.empty(len(begins) + len(drafts), np.int32)
        is_draft = np.empty(len(packed), np.bool_)
        is_draft.fill(True)
        is_draft[begins], packed[begins] = False, tokens
        packed[is_draft.nonzero()[0]] = drafts
        return packed

    def _spread(self, sources: Counts, begins: Counts, total: int) -> Counts:
        """Where each row's last token comes from, where the row begins; drafts come from nowhere."""
        if _NOWHERE.holds(sources):
            return _NOWHERE.first(total)
        spread = np.full(total, -1, np.int64)
        spread[begins] = sources
        return spread

    def _await(self, state: State, step: Step, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], Counts, Counts]:
        """The last token of each decode as far as it is known, -1 where it is not, and the batch and the place that it comes from."""
        count = len(tokens)
        if step.decodes_after >= 0:
            return _NO_VALUE.first(count), np.full(count, step.decodes_after, np.int64), rising(count)
        awaited = state.outstanding.awaited()
        assert awaited is not None, "a batch is out"
        is_known = step.decode_starts < state.manager.rows.num_tokens[step.decodes]
        batches = np.where(is_known, -1, awaited.batch[step.decodes])
        places = np.where(is_known, -1, awaited.place[step.decodes])
        return np.where(is_known, tokens, np.int32(-1)), batches, places

    def _await_chunk(
        self,
        state: State,
        chunk: tuple[int, int, int, int],
        token_ids: NDArray[np.int32],
        batches: Counts,
        places: Counts,
    ) -> None:
        """Positions of a chunk (row, first, end, place of the first) whose tokens batches that are out sample, in their order."""
        row, first, end, start = chunk
        known = state.manager.rows.num_tokens.item(row)
        sources = state.outstanding.sources_of(state.columns.owner[row], state.columns.sequence.item(row))
        for position in range(max(first, known), end):
            at = start + position - first
            token_ids[at], (batches[at], places[at]) = -1, sources[position - known]

    def _chunk_slots(
        self, tables: NDArray[np.int32], size: int, chunks: list[tuple[int, int, int, bool]]
    ) -> NDArray[np.int64]:
        """All slots of the blocks that each chunk touches, one chunk after the other, int64."""
        parts = [tables[row, first // size : -(-(first + count) // size)] for row, first, count, _ in chunks]
        # Casts, products and sums apart: numpy does one that mixes types piece by piece, in buffers.
        starts = np.concatenate(parts).astype(np.int64)
        starts *= size
        slots: NDArray[np.int64] = starts[:, None] + rising(size)
        return slots.reshape(-1)
