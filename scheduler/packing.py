"""A decided step as the arrays that a model runner needs. Decides and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import GrowingView, rising
from paged.block_manager import Composed, Memory, Moves
from paged.block_manager.moves import NO_MOVES, joined

from .batch import NO_LOADS, Batch, Ticket
from .composition import ones
from .outstanding import Outstanding
from .rows import RowColumns, Rows
from .state import Step

Counts = NDArray[np.int64]
Tokens = NDArray[np.int32]

_ALL_TRUE = GrowingView(lambda length: np.ones(length, np.bool_))
_ALL_ZERO = GrowingView(lambda length: np.zeros(length, np.int64))
_NOWHERE = GrowingView(lambda length: np.full(length, -1, np.int64))
_NO_VALUE = GrowingView(lambda length: np.full(length, -1, np.int32))


class _Packed(NamedTuple):
    """Of each token its id, where it comes from, its position and its slot."""

    token_ids: Tokens
    batches: Counts
    places: Counts
    positions: Counts
    slots: Counts


class Packer:
    """Builds batches; keeps the names of the rows that the last one had, because in a steady stretch they stay the same."""

    def __init__(self, owner: object, manager: Memory, columns: RowColumns, outstanding: Outstanding) -> None:
        """`owner`: whose the batches are."""
        self._owner, self._manager, self._columns, self._outstanding = owner, manager, columns, outstanding
        self._rows: Rows = np.empty(0, np.int64)
        self._ids: NDArray[np.object_] = np.empty(0, object)
        self._sequences: NDArray[np.int64] = np.empty(0, np.int64)
        self._usual = ones(0), rising(1), _ALL_ZERO.first(0), _ALL_TRUE.first(0)

    def pack(
        self,
        step: Step,
        composed: Composed,
        positions: Counts,
        *,
        silent: set[int],
        covers_running: bool,
        has_outputs: bool,
    ) -> Batch:
        """The batch of a step that is committed to memory as `composed`.

        `positions` are those of its decodes and their drafts; `silent` rows sample nothing.
        """
        flight = composed.flight
        rows, ends = flight.rows, flight.ends
        packed = self._decodes(step, composed, positions)
        if step.chunks:
            packed = self._with_chunks(step, composed, packed)
        if rows is not self._rows:
            self._name(rows)
        counts, start_loc, num_drafts, samples = self._usual
        num_samples, drafts, known = len(rows), None, ends
        if silent or step.chunks:
            samples, num_samples = _samples(step, rows, silent)
        if step.chunks or step.draft_counts is not None:
            counts, start_loc = ends - flight.starts, np.zeros(len(rows) + 1, np.int64)
            counts.flags.writeable = False
            np.cumsum(counts, out=start_loc[1:])
        if step.draft_counts is not None:
            num_drafts = drafts = np.zeros(len(rows), np.int64)
            num_drafts[: len(step.decodes)] = step.draft_counts
            num_drafts.flags.writeable = False
            known = ends - num_drafts
        loads, moves = _copies_of(step) if step.loads or step.moves else (NO_LOADS, NO_MOVES)
        out = None if composed.is_empty else flight
        ticket = Ticket(
            self._owner, rows, known, samples, num_samples, covers_running, out, drafts, step.draft_tokens, {}, {}
        )
        return Batch(
            number=composed.number,
            rows=rows.copy(),
            num_tokens=counts,
            query_start_loc=start_loc,
            token_ids=packed.token_ids,
            source_batches=packed.batches,
            source_places=packed.places,
            positions=packed.positions,
            slot_mapping=packed.slots,
            seq_lens=ends.copy(),
            samples=samples,
            num_drafts=num_drafts,
            ids=self._ids,
            sequences=self._sequences,
            block_tables=self._manager.rows.block_tables,
            table_rows=composed.changes.rows,
            table_columns=composed.changes.columns,
            table_blocks=composed.changes.blocks,
            moves=moves,
            loads=loads,
            ticket=ticket,
            has_outputs=has_outputs,
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
        )

    def _name(self, rows: Rows) -> None:
        """Remember which request, and which sequence of it, each of these rows serves, and what they have if each decodes."""
        self._rows, num = rows, len(rows)
        self._usual = ones(num), rising(num + 1), _ALL_ZERO.first(num), _ALL_TRUE.first(num)
        self._ids = self._columns.id[rows]
        self._ids.setflags(write=False)
        if self._columns.num_later:
            self._sequences = self._columns.sequence[rows]
            self._sequences.setflags(write=False)
        else:
            self._sequences = _ALL_ZERO.first(len(rows))

    def _decodes(self, step: Step, composed: Composed, positions: Counts) -> _Packed:
        """The rows that decode: of each its last token, and its drafts behind it."""
        count, tokens, drafts = len(step.decodes), composed.last_tokens, step.draft_tokens
        batches = places = _NOWHERE.first(count)
        if self._outstanding.batches and count:
            tokens, batches, places = self._awaited(step, tokens)
        if step.draft_counts is not None and drafts is not None:
            counts = step.draft_counts + 1
            total, begins, last = len(positions), counts.cumsum() - counts, tokens
            is_draft = np.ones(total, np.bool_)
            tokens = np.empty(total, np.int32)
            is_draft[begins], tokens[begins] = False, last
            tokens[is_draft.nonzero()[0]] = drafts
            batches, places = _spread(batches, begins, total), _spread(places, begins, total)
        elif not step.chunks:
            positions = positions.copy()
        return _Packed(tokens, batches, places, positions, composed.slots)

    def _awaited(self, step: Step, tokens: Tokens) -> tuple[Tokens, Counts, Counts]:
        """The last token of each decode as far as it is known, -1 where it is not, and the batch and the place that it comes from."""
        count = len(tokens)
        if step.decodes_after >= 0:
            return _NO_VALUE.first(count), np.full(count, step.decodes_after, np.int64), rising(count)
        awaited = self._outstanding.awaited()
        assert awaited is not None, "a batch is out"
        is_known = step.decode_starts < self._manager.rows.num_tokens[step.decodes]
        batches = np.where(is_known, -1, awaited.batch[step.decodes])
        places = np.where(is_known, -1, awaited.place[step.decodes])
        return np.where(is_known, tokens, np.int32(-1)), batches, places

    def _with_chunks(self, step: Step, composed: Composed, decodes: _Packed) -> _Packed:
        """The same, and behind the decodes the chunks of prompts."""
        tables, size, known = self._manager.rows.block_tables, self._manager.block_size, self._manager.rows.tokens
        spans = [(row, first, first + count) for row, first, count, _ in step.chunks]
        columns = [tables[row, first // size : -(-end // size)] for row, first, end in spans]
        # All slots of all blocks that they touch. Casts, products and sums apart: numpy does one that mixes types piece by piece, in buffers.
        bases = np.concatenate(columns).astype(np.int64)
        bases *= size
        touched: Counts = (bases[:, None] + rising(size)).reshape(-1)
        numbers, at = rising(max(end for _, _, end in spans)), 0
        slots, positions, token_ids = [decodes.slots], [decodes.positions], [decodes.token_ids]
        for blocks, (row, first, end) in zip(columns, spans, strict=True):
            begin = at + first % size
            slots.append(touched[begin : begin + end - first])
            positions.append(numbers[first:end])
            token_ids.append(known[row, first:end])
            at += len(blocks) * size
        tokens, nowhere = np.concatenate(token_ids), _NOWHERE.first(sum(map(len, token_ids)))
        packed = _Packed(
            tokens,
            nowhere,
            nowhere,
            np.concatenate(positions),
            np.concatenate(slots),
        )
        return self._with_sources(packed, decodes, spans) if self._outstanding.batches else packed

    def _with_sources(self, packed: _Packed, decodes: _Packed, spans: list[tuple[int, int, int]]) -> _Packed:
        """The same, and where tokens come from that batches which are out sample: of those the ids are -1."""
        start = len(decodes.batches)
        batches, places = packed.batches.copy(), packed.places.copy()
        batches[:start], places[:start] = decodes.batches, decodes.places
        for row, first, end in spans:
            known = self._manager.rows.num_tokens.item(row)
            if known < end:
                sources = self._outstanding.sources_of(self._columns.owner[row], self._columns.sequence.item(row))
                unknown = slice(start + max(known - first, 0), start + end - first)
                packed.token_ids[unknown] = -1
                batches[unknown], places[unknown] = np.array(sources[max(first - known, 0) : end - known]).T
            start += end - first
        return packed._replace(batches=batches, places=places)


def _copies_of(step: Step) -> tuple[NDArray[np.int32], Moves]:
    """The loads and the moves of a step, read-only: a cancel carries them over as they are."""
    loads, moves = np.array(step.loads, np.int32).reshape(-1, 3), joined(step.moves)
    for carried in (loads, moves.device_to_host, moves.host_to_device, moves.device_to_device):
        carried.flags.writeable = False
    return loads, moves


def _samples(step: Step, rows: Rows, silent: set[int]) -> tuple[NDArray[np.bool_], int]:
    """Whether each row samples, read-only, and how many do: not in the middle of a prompt, and none that is silent."""
    partial = []
    if step.chunks:
        partial = [place for place, chunk in enumerate(step.chunks, len(step.decodes)) if not chunk[3]]
    if not partial and not silent:
        return _ALL_TRUE.first(len(rows)), len(rows)
    samples = ~np.isin(rows, list(silent)) if silent else np.ones(len(rows), np.bool_)
    samples[partial] = False
    samples.flags.writeable = False
    return samples, int(np.count_nonzero(samples))


def _spread(sources: Counts, begins: Counts, total: int) -> Counts:
    """Where each row's last token comes from, where the row begins, and nowhere for its drafts."""
    if _NOWHERE.holds(sources):
        return _NOWHERE.first(total)
    spread = np.full(total, -1, np.int64)
    spread[begins] = sources
    return spread
