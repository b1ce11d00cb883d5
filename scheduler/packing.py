"""A decided step, packed into the arrays that an engine needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import Tokens
from paged.base.growing import GrowingView, ones, rising, rising_from
from paged.block_manager import Composed, Moves
from paged.block_manager.moves import NO_MOVES, joined

from .batch import NO_LOADS, Batch, Ticket, read_only
from .rows import Counts, Rows
from .state import State, Step

_ALL_TRUE = GrowingView(lambda length: np.ones(length, np.bool_))
_ALL_ZERO = GrowingView(lambda length: np.zeros(length, np.int64))
_NOWHERE = GrowingView(lambda length: np.full(length, -1, np.int64))


class Packer:
    """Makes batches. Keeps the ids and sequences of the last batch's rows, because steady steps have the same rows."""

    def __init__(self, owner: object, state: State) -> None:
        self._owner, self._state, self._manager = owner, state, state.manager
        # Of which `Running.version` the names are.
        self._version = -1

    def pack(self, step: Step) -> Batch:
        """Commit a decided step, whose rows are in flight from now on. Return its batch."""
        state, manager = self._state, self._manager
        composed, positions = self._commit(step)
        flight, changes = composed.flight, composed.changes
        rows, ends = flight.rows, flight.ends
        version = state.running.version_of(rows)
        token_ids, positions, slots, begins = self._tokens(step, composed, positions)
        batches, places = self._sources(step, token_ids, begins)
        if version < 0 or version != self._version:
            self._name(rows)
            self._version = version
        num, drafts, known = len(rows), None, ends
        (counts, start_loc, num_drafts, samples), num_samples = self._usual, num
        if step.chunks or step.draft_counts is not None:
            counts, start_loc = ends - flight.starts, np.zeros(num + 1, np.int64)
            if step.loads:
                # Without tokens that the batch loads.
                counts[len(step.decodes) :] = [chunk[2] for chunk in step.chunks]
            np.cumsum(read_only(counts), out=start_loc[1:])
        if step.draft_counts is not None:
            num_drafts = drafts = np.zeros(num, np.int64)
            num_drafts[: len(step.decodes)] = step.draft_counts
            known = ends - read_only(num_drafts)
        if step.chunks or state.columns.not_sampling:
            samples, num_samples = _samples(step, rows, state.columns.not_sampling)
        loads, moves = _copies_of(step) if step.loads or step.moves else (NO_LOADS, NO_MOVES)
        out = None if composed.is_empty else flight
        ticket = Ticket(self._owner, rows, version, known, samples, num_samples, out, drafts, step.draft_tokens, {}, {})
        return Batch(
            number=composed.number,
            rows=rows.copy(),
            num_tokens=counts,
            query_start_loc=start_loc,
            token_ids=token_ids,
            source_batches=batches,
            source_places=places,
            positions=positions,
            slot_mapping=slots,
            seq_lens=ends.copy(),
            samples=samples,
            num_drafts=num_drafts,
            ids=self._ids,
            sequences=self._sequences,
            block_tables=manager.rows.block_tables,
            table_rows=changes.rows,
            table_columns=changes.columns,
            table_blocks=changes.blocks,
            moves=moves,
            loads=loads,
            ticket=ticket,
            groups=None if manager.layout.is_plain else manager.group_tables(flight),
            has_outputs=bool(state.pending_outputs),
            preempted=tuple(step.preempted),
            admitted=tuple(step.admitted),
        )

    def _commit(self, step: Step) -> tuple[Composed, Counts]:
        """Commit the step to memory. Return memory's record of the batch, and the positions of decodes and drafts."""
        state, positions, counts = self._state, step.decode_starts, None
        if step.draft_counts is not None:
            counts = step.draft_counts + 1
            positions = rising_from(positions, counts)
        has_more = bool(state.pending_outputs or step.loads or step.moves)
        composed = self._manager.commit(step.decodes, positions, counts, state.now, has_more=has_more)
        step.move(composed.moves)
        for row, _, _ in step.loads:
            request = state.columns.owner[row]
            request.await_load(request.num_loading, composed.number)
        return composed, positions

    def _name(self, rows: Rows) -> None:
        """Remember which sequence each row serves, and the arrays of a batch in which each row decodes."""
        columns, num = self._state.columns, len(rows)
        self._usual = ones(num), rising(num + 1), _ALL_ZERO.first(num), _ALL_TRUE.first(num)
        self._ids, self._sequences = read_only(columns.id[rows]), read_only(columns.sequence[rows])

    def _tokens(
        self, step: Step, composed: Composed, positions: Counts
    ) -> tuple[Tokens, Counts, Counts, Counts | None]:
        """Return ids, positions and slots of tokens, decodes first; and where each decode begins, None: one each."""
        begins, token_ids = None, composed.last_tokens
        if step.draft_counts is not None and step.draft_tokens is not None:
            begins = rising(len(step.decodes)) + step.draft_counts.cumsum() - step.draft_counts
            token_ids = np.empty(len(positions), np.int32)
            token_ids[begins] = composed.last_tokens
            token_ids[rising_from(begins + 1, step.draft_counts)] = step.draft_tokens
        elif not step.chunks:
            # The scheduler keeps the array, and an engine may change its own.
            positions = positions.copy()
        if not step.chunks:
            return token_ids, positions, composed.slots, begins
        size, tables, ids = self._manager.block_size, self._manager.rows.block_tables, self._manager.rows.tokens
        columns = [tables[row, first // size : -(-(first + count) // size)] for row, first, count, _ in step.chunks]
        # All slots of all touched blocks. The cast is apart: numpy buffers an operation on mixed types.
        bases = np.concatenate(columns).astype(np.int64)
        touched, at = (bases[:, None] * size + rising(size)).reshape(-1), 0
        parts, written_from = [(token_ids, positions, composed.slots)], composed.flight.written_from
        for blocks, (row, first, count, _) in zip(columns, step.chunks, strict=True):
            begin = at + first % size
            numbers = rising(first + count)[first:]
            if written_from and (skipped := written_from.get(row, 0) - first) > 0:
                touched[begin : begin + skipped] = -1
            parts.append((ids[row, first : first + count], numbers, touched[begin : begin + count]))
            at += len(blocks) * size
        token_ids, positions, slots = map(np.concatenate, zip(*parts, strict=True))
        return token_ids, positions, slots, begins

    def _sources(self, step: Step, token_ids: Tokens, begins: Counts | None) -> tuple[Counts, Counts]:
        """Set the id of each token not sampled yet to -1. Return the batch and the place that sample it, else -1."""
        outstanding, columns = self._state.outstanding, self._state.columns
        num, after, num_known = len(token_ids), step.decodes_after, self._manager.rows.num_tokens
        if not num or not outstanding.batches:
            nowhere = _NOWHERE.first(num)
            return nowhere, nowhere
        begins = rising(len(step.decodes)) if begins is None else begins
        if after >= 0 and num == len(begins):
            token_ids.fill(-1)
            return read_only(np.full(num, after, np.int64)), rising(num)
        batches, places = np.full(num, -1, np.int64), np.full(num, -1, np.int64)
        if after >= 0:
            token_ids[begins], batches[begins], places[begins] = -1, after, rising(len(begins))
        elif len(begins):
            awaited = outstanding.awaited()
            assert awaited is not None, "a batch is out"
            is_unknown = step.decode_starts >= num_known[step.decodes]
            at, rows = begins[is_unknown], step.decodes[is_unknown]
            token_ids[at] = -1
            batches[at], places[at] = awaited.batch[rows], awaited.place[rows]
        start = num - sum(chunk[2] for chunk in step.chunks)
        for row, first, count, _ in step.chunks:
            known = num_known.item(row)
            if known < first + count:
                sources = outstanding.sources_of(columns.owner[row], columns.sequence.item(row))
                here = slice(start + max(known - first, 0), start + count)
                token_ids[here] = -1
                batches[here], places[here] = np.array(sources[max(first - known, 0) : first + count - known]).T
            start += count
        # These arrays are read again when an earlier batch ends.
        return read_only(batches), read_only(places)


def _copies_of(step: Step) -> tuple[Tokens, Moves]:
    """Return the step's loads and moves, read-only: after a cancel, a later batch has these very arrays."""
    moves = joined(step.moves)
    for pairs in (moves.device_to_host, moves.host_to_device, moves.device_to_device):
        read_only(pairs)
    return read_only(np.array(step.loads, np.int32).reshape(-1, 3)), moves


def _samples(step: Step, rows: Rows, not_sampling: set[int]) -> tuple[NDArray[np.bool_], int]:
    """Return which rows sample, and how many: not those in the middle of a prompt, and none of `not_sampling`."""
    partial = [place for place, chunk in enumerate(step.chunks, len(step.decodes)) if not chunk[3]]
    samples = ~np.isin(rows, list(not_sampling)) if not_sampling else np.ones(len(rows), np.bool_)
    samples[partial] = False
    return read_only(samples), int(np.count_nonzero(samples))
