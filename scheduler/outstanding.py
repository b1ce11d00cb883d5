"""Outstanding batches: their shares and their samples, and the copies of cancelled batches.

    batch 7 | row 3 samples at place 0 |      batch 8 | row 3 computes that token: its value comes from (7, 0) |

Only this module changes a ticket. A sequence that gives its row back still gets what batches sample for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged.base.arguments import Tokens
from paged.base.growing import ones
from paged.block_manager import Memory
from paged.block_manager.moves import NO_MOVES, Moves, pairs_of
from paged.errors import BatchError

from .batch import NO_LOADS, Batch, Left, SchedulerStats
from .request import RequestState
from .rows import Counts, RowColumns, Rows

# `Carried.number` of copies for forks. Batches count from 1.
_FORKS = 0


class Awaited:
    """By row: how many samples are outstanding, batch and place of the latest one, and whether drafts are undecided."""

    def __init__(self, num_rows: int, batches: list[Batch]) -> None:
        self.num = np.zeros(num_rows, np.int64)
        self.batch, self.place = np.full((2, num_rows), -1, np.int64)
        self.is_undecided = np.zeros(num_rows, np.bool_)
        for batch in batches:
            ticket, places = batch.ticket, batch.ticket.places_sampled()
            self._note(batch, ticket.rows[places], places)
            for place, left in ticket.gone.items():
                row = left.request.rows[left.sequence]
                if not left.is_void and ticket.samples[place] and row >= 0:
                    self._note(batch, np.array([row]), np.array([place]))

    def _note(self, batch: Batch, rows: Rows, places: Counts) -> None:
        self.num[rows] += 1
        self.batch[rows] = batch.number
        self.place[rows] = places
        if batch.ticket.draft_counts is not None:
            self.is_undecided[rows] |= batch.ticket.draft_counts[places] > 0


class Outstanding:
    """Batches that have not ended: `batches`, oldest first. With `resumes_known`, a row computes a token that is not
    sampled yet only if the last batch samples it, and the row has the same blocks as in that batch."""

    def __init__(self, manager: Memory, columns: RowColumns, *, resumes_known: bool) -> None:
        self._manager, self._columns, self._resumes_known = manager, columns, resumes_known
        self.batches: list[Batch] = []
        # In this step: outstanding samples by row; with `resumes_known`, rows that changed blocks since the last batch.
        self._awaited: Awaited | None = None
        self._changed: set[int] = set()
        # (request id, place, blocks) of ended requests whose blocks stay held: by the number of a batch that loads into them,
        # until it ends; and by the id of a request that saves them, until `Scheduler.saved`.
        self.held: dict[int | str, list[tuple[str, int, Counts]]] = {}

    def begin_step(self) -> None:
        """Begin a step. Called before any block table grows, because it reads which tables have changed so far."""
        self._awaited = None
        if self._resumes_known:
            self._changed = self._manager.growth.changed_rows if self.batches else set()

    def put_out(self, batch: Batch) -> None:
        """Add a batch. Note in its ticket how many tokens it recomputes. Forget rows that have recomputed all."""
        self.batches.append(batch)
        ticket, recovering = batch.ticket, self._columns.recovering
        for row, high in list(recovering.items()) if recovering else ():
            if self._manager.rows.num_computed[row] >= high:
                del recovering[row]
            elif (place := ticket.place_of(row)) >= 0:
                start = batch.seq_lens.item(place) - batch.num_tokens.item(place)
                ticket.recomputed[place] = max(0, min(high, ticket.ends.item(place)) - start)

    def end(self, batch: Batch) -> None:
        self.batches.remove(batch)

    def forget_awaited(self) -> None:
        """Forget the outstanding samples by row: a sequence has lost its row, or has got one."""
        self._awaited = None

    def awaited(self) -> Awaited | None:
        """Return the outstanding samples by row, which are counted once a step; None while no batch is out."""
        if self._awaited is None and self.batches:
            self._awaited = Awaited(len(self._manager.rows.num_tokens), self.batches)
        return self._awaited

    def steady_source(self, rows: Rows, version: int) -> tuple[Rows, Counts, Counts] | None:
        """Return (rows, launched, launched + 1) if the last batch samples what the running rows, all of them, decode.
        `version`: see `Running.version`."""
        last, columns = self.batches[-1], self._columns
        ticket = last.ticket
        if ticket.version != version or not ticket.all_sample or ticket.gone:
            return None
        # Where a row with drafts goes on depends on how many of them are right.
        if columns.not_sampling or ticket.draft_counts is not None:
            return None
        if self._resumes_known and (self._changed or last.number != self._manager.batch - 1):
            return None
        ends = ticket.ends + ones(len(rows))
        return None if len(columns.filled(rows, ends, version)) else (rows, ticket.ends, ends)

    def shares_of(self, request: RequestState, sequence: int) -> list[tuple[Batch, int]]:
        """Return (batch, place) of each share of the sequence that is not void, also in rows that it gave back."""
        row = request.rows[sequence]
        found: list[tuple[Batch, int]] = []
        for batch in self.batches:
            ticket = batch.ticket
            for place, left in ticket.gone.items():
                if left.request is request and left.sequence == sequence and not left.is_void:
                    found.append((batch, place))
            if row >= 0 and (place := ticket.place_of(row)) >= 0:
                found.append((batch, place))
        return found

    def sources_of(self, request: RequestState, sequence: int) -> list[tuple[int, int]]:
        """Return (batch number, place among its rows) of each outstanding sample of the sequence, oldest first."""
        return [(b.number, place) for b, place in self.shares_of(request, sequence) if b.ticket.samples[place]]

    def total_of(self, row: int) -> int:
        """Return `totals_of` one row."""
        known = self._manager.rows.num_tokens.item(row)
        return self.totals_of(np.array([row])).item() if self.batches else known

    def totals_of(self, rows: Rows) -> Counts:
        """Return how many tokens rows know at most after all batches, int64 [n]; launched ones if a row must wait."""
        known, awaited = self._manager.rows.num_tokens[rows], self.awaited()
        if awaited is None:
            return known
        num_awaited = awaited.num[rows]
        totals: Counts = known + num_awaited
        # Only awaited samples can fill a row: it knows fewer tokens than its full length, or it would have ended.
        ends = (totals >= self._columns.max_total[rows]) | awaited.is_undecided[rows]
        if self._resumes_known:
            # The last batch, which may be empty or have ended, has to sample the newest token.
            goes_on = awaited.batch[rows] == self._manager.batch - 1
            if self._changed:
                goes_on &= ~np.isin(rows, list(self._changed))
            ends |= (num_awaited > 0) & ~goes_on
        return np.where(ends, np.minimum(totals, self._manager.rows.num_launched[rows]), totals)

    def keeps_out(self, request: RequestState) -> bool:
        """Whether a suspended or waiting request must stay out until all batches that sample for it have ended."""
        return self._resumes_known and self._samples_for(request)

    def computes(self, request: RequestState) -> bool:
        return any(self.shares_of(request, i) for i in range(len(request.rows)))

    def has_todo(self, request: RequestState) -> bool:
        """Whether a row of the request has known tokens that are not launched."""
        tables = self._manager.rows
        return any(tables.num_tokens[row] != tables.num_launched[row] for row in request.live_rows)

    def is_idle(self, request: RequestState) -> bool:
        """Whether a request with rows can compute nothing until the caller appends tokens."""
        return not self.has_todo(request) and not self._samples_for(request)

    def goes_on(self, request: RequestState) -> bool:
        """Whether a row of the request awaits samples and is below its full length when they have come."""
        awaited, rows = self.awaited(), np.array(request.live_rows)
        if awaited is None or not len(rows):
            return False
        num = awaited.num[rows]
        return bool(((num > 0) & (self._manager.rows.num_tokens[rows] + num < self._columns.max_total[rows])).any())

    def is_busy(self, request_id: str) -> bool:
        """Whether a batch has a void share of a request with this id, or blocks of an ended one stay held."""
        if not self.batches and not self.held:
            return False
        held = [other for blocks in self.held.values() for other, *_ in blocks]
        void = [left.request.id for batch in self.batches for left in batch.ticket.gone.values() if left.is_void]
        return request_id in self.held or request_id in held or request_id in void

    def leave(self, request: RequestState, sequence: int, *, has_ended: bool) -> None:
        """Note that the sequence gives its row back: its shares outlive the row, or are void if it has ended."""
        self.forget_awaited()
        for batch, place in self.shares_of(request, sequence):
            batch.ticket.gone[place] = Left(request, sequence, has_ended)

    def void_unknown(self, request: RequestState, sequence: int) -> None:
        """Void shares that reach beyond the known tokens of a live sequence: they need a token that did not come."""
        row, tokens = request.rows[sequence], request.tokens[sequence]
        num_known = self._manager.rows.num_tokens.item(row) if tokens is None else len(tokens)
        for batch, place in self.shares_of(request, sequence):
            if batch.ticket.ends[place] > num_known:
                batch.ticket.gone[place] = Left(request, sequence, True)
        if row >= 0:
            if self._manager.layout.states:
                # A row with states may fall back further than to `num_known`.
                self._columns.recover(row, num_known)
            self._manager.give_up_from(row, num_known)

    def count_waste(self, batch: Batch, stats: SchedulerStats) -> None:
        """Count the void and the recomputed tokens of a batch that ran; recomputed ones for their request, too."""
        ticket = batch.ticket
        stats.count("voided_tokens", sum(batch.num_tokens.item(i) for i, left in ticket.gone.items() if left.is_void))
        for place, num in ticket.recomputed.items():
            gone = ticket.gone.get(place)
            if gone is None or not gone.is_void:
                request = self._columns.owner[ticket.rows[place]] if gone is None else gone.request
                request.count("recomputed_tokens", num)
                stats.count("recomputed_tokens", num)

    def hold(self, request: RequestState, until: int | str) -> None:
        """Hold the device blocks of a request that ends. `until`: see `held`."""
        held = self.held.setdefault(until, [])
        for row in request.live_rows:
            for place, blocks in self._manager.blocks_of(row):
                self._manager.index.pools[place].keep(blocks)
                held.append((request.id, place, blocks))

    def let_go(self, until: int | str) -> None:
        """Release the blocks that were held until this batch ended, or this request was saved."""
        for _, place, blocks in self.held.pop(until, ()):
            self._manager.index.pools[place].let_go(blocks)

    def held_blocks(self) -> list[tuple[int, Counts]]:
        """Return (place, blocks) of what is held for ended requests; a block that is held twice comes twice."""
        return [(place, blocks) for held in self.held.values() for _, place, blocks in held]

    def _samples_for(self, request: RequestState) -> bool:
        return bool(self.batches) and any(self.sources_of(request, i) for i in range(len(request.rows)))


@dataclass(slots=True)
class Carried:
    moves: Moves
    loads: Tokens  # see `Batch.loads`
    number: int  # of the cancelled batch, or _FORKS


class CarriedCopies:
    """Copies of cancelled batches and of forks that still have to run. Each of the next batches takes one group. Groups
    never mix: an engine runs a group's pairs at once, so no pair may read what another one writes."""

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self.groups: list[Carried] = []
        # Number of the latest batch that was cancelled after its moves ran: the moves of earlier batches ran, too.
        self._last_moved = 0

    @property
    def are_of_forks(self) -> bool:
        return all(group.number == _FORKS for group in self.groups)

    def check_cancel(self, batch: Batch, moved: bool) -> None:
        """Raise BatchError if the batch's moves did not run though a later batch's moves did."""
        if not moved and len(batch.moves) and batch.number < self._last_moved:
            later = f"runs before batch {self._last_moved}, which was cancelled after its moves had run"
            raise BatchError(batch.number, f"{later}; cancel it with moved=True.")

    def keep(self, batch: Batch, moved: bool) -> None:
        """Carry the copies of a cancelled batch, in front of later batches' ones; none if they ran (`moved`)."""
        if moved:
            self._last_moved = max(self._last_moved, batch.number)
            return
        loads = self._wanted(batch.loads, batch.number)
        if len(batch.moves) or len(loads):
            self.groups.insert(0, Carried(batch.moves, loads, batch.number))

    def add_copy(self, source: int, copy: int) -> None:
        """Carry the copy of a fork's partial block, from block `source` to block `copy`."""
        group = self.groups[-1] if self.groups and self.groups[-1].number == _FORKS else None
        pairs: dict[int, int] = {} if group is None else dict(group.moves.device_to_device[:, ::-1].tolist())
        # A source that itself waits for its copy is read where that copy reads. An ended fork's copy is replaced.
        pairs[copy] = pairs.get(source, source)
        if group is None or pairs.keys() & set(pairs.values()):
            pairs, group = {copy: source}, Carried(NO_MOVES, NO_LOADS, _FORKS)
            self.groups.append(group)
        group.moves = Moves(device_to_device=pairs_of([(read, written) for written, read in pairs.items()]))

    def forget_stale(self) -> None:
        """Drop loads that no request waits for any more, and groups that are empty then: they would delay a step."""
        for group in self.groups:
            group.loads = self._wanted(group.loads, group.number)
        self.groups = [group for group in self.groups if len(group.moves) or len(group.loads)]

    def take(self) -> Carried:
        """Remove and return the first group, without loads that no request waits for any more."""
        group = self.groups.pop(0)
        group.loads = self._wanted(group.loads, group.number)
        return group

    def _wanted(self, loads: Tokens, number: int) -> Tokens:
        owners = [self._columns.owner[row] for row in loads[:, 0].tolist()]
        is_wanted = [owner is not None and bool(owner.num_loading) and owner.load_batch == number for owner in owners]
        return loads[np.array(is_wanted, np.bool_)]
