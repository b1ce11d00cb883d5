"""Composition of a step: num_computed catches up with num_tokens. A row with one token to go decodes, with more it
computes a chunk. Requests and memory are settled before rows are placed; a placed row stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import GrowingView
from paged.block_manager.moves import NO_MOVES
from paged.errors import OutOfBlocks

from .arguments import UNLIMITED
from .preemption import preempt, victims
from .request import RequestState
from .rows import Rows
from .state import State, Step

Counts = NDArray[np.int64]

_ONES = GrowingView(lambda length: np.ones(length, np.int64))


def ones(count: int) -> Counts:
    """Return int64 [count] of 1, a read-only view that all batches of the process share."""
    return _ONES.first(count)


class Composition:
    """Running requests in order, then newcomers. Other strategies are subclasses. `one_token_each`: from some position
    on a row computes one token a step, even of its prompt; no drafts."""

    one_token_each = False

    def compose(self, state: State, step: Step) -> None:
        if state.running.num:
            compose_running(state, step)
        if state.waiting.num or state.away.num:
            state.admission.let_in(state, step)

    def wanted(self, state: State, rows: Rows, todo: Counts) -> Counts:
        """Return the tokens that each row may compute in one step of its `todo`, whatever the budget."""
        return np.minimum(todo, state.limits.max_chunk)

    def ranked(self, todo: Counts) -> Counts:
        """Return the places of rows with `todo` tokens to go, in the order in which they get the budget."""
        return np.arange(len(todo))

    def most(self, state: State, num_launched: int) -> int:
        """Return how many tokens one row may compute in one step after `num_launched`."""
        return state.limits.max_chunk

    def reason(self, state: State) -> str | None:
        """Return why requests wait though there is room for them; None if they do not."""
        return None


class DecodesFirst(Composition):
    """Decodes, then chunks of prompts, as Dynamic SplitFuse does."""

    def ranked(self, todo: Counts) -> Counts:
        is_decode = todo == 1
        return np.concatenate([is_decode.nonzero()[0], (~is_decode).nonzero()[0]])


def compose_running(state: State, step: Step) -> None:
    """Place the running rows as budget, seats and memory allow, decodes first. Their blocks may stay promised."""
    manager, outstanding, rows = state.manager, state.outstanding, state.running_rows.array(state.running)
    decodes = state.running_rows.take_steady()
    todo: Counts | None = None
    if outstanding.batches:
        decodes = _steady_ahead(state, rows)
    is_ahead = outstanding.batches and decodes is not None
    if decodes is None or decodes[0] is not rows:
        # Otherwise nothing is gathered: a decode step of 1,024 rows in `paged bench scheduler`.
        launched = manager.rows.num_launched[rows]
        todo = outstanding.totals_of(rows) - launched
        decodes = None if np.count_nonzero(todo != 1) else (rows, launched, launched + 1)
    if decodes is not None and len(rows) <= step.budget and len(rows) <= step.seats and not state.books.bounded:
        try:
            _place_decodes(state, step, *decodes)
        except OutOfBlocks:
            # Nothing changed; victims give up blocks below.
            pass
        else:
            if is_ahead:
                step.decodes_after = outstanding.batches[-1].number
            elif not outstanding.batches and not state.away.num and not state.reservation.is_counted:
                state.books.owe_nothing()
            return
    _compose_in_parts(state, step, rows, ones(len(rows)) if todo is None else todo)


def _steady_ahead(state: State, rows: Rows) -> tuple[Rows, Counts, Counts] | None:
    """Return (rows, launched, launched + 1) if the latest batch samples for all running rows and none gets full."""
    ticket = state.outstanding.steady_source(rows)
    if ticket is None or state.columns.silent:
        return None
    ends = ticket.ends + 1
    return None if state.columns.reach_length(rows, ends) else (rows, ticket.ends, ends)


def _place_decodes(state: State, step: Step, rows: Rows, starts: Counts, ends: Counts) -> None:
    """Place a token of each row, with `starts` launched tokens before and `ends` after. Blocks may stay promised."""
    moves = state.manager.place(rows, starts, ends, one_each=True)
    step.decodes, step.decode_starts, step.decode_ends = rows, starts, ends
    step.budget -= len(rows)
    step.seats -= len(rows)
    if moves is not NO_MOVES and len(moves):
        step.moves.append(moves)


def place_chunk(
    state: State, step: Step, request: RequestState, row: int, most: int = UNLIMITED, *, is_fresh: bool = False
) -> int:
    """Place next tokens of the row: at most `most`, the budget, and what its memory holds. Return how many. Extends its
    hit first unless that is done (`is_fresh`). Places none if another row of this batch computes what comes next."""
    manager = state.manager
    if not is_fresh:
        is_first_life = request.preemptions == 0
        room = state.books.allowance(request) if manager.host_caching else None
        num_won = manager.extend_hit(row, count=is_first_life, room=room)
        if is_first_life and num_won:
            request.count(hit_tokens=num_won)
    request.follows = _leader_of(state, step, request, row)
    if request.follows is not None:
        return 0
    launched = manager.rows.num_launched.item(row)
    todo = state.outstanding.total_of(row) - launched
    holds = (manager.rows.num_blocks.item(row) + state.books.allowance(request)) * manager.block_size
    count = min(todo, step.budget, most, state.composition.most(state, launched), holds - launched)
    if count <= 0 or step.seats <= 0:
        return 0
    moves = manager.place_one(row, count)
    if len(moves):
        step.moves.append(moves)
    step.place((row, launched, count, count == todo), leads=count < todo and request.request.writes_cache)
    return count


def _compose_in_parts(state: State, step: Step, rows: Rows, todo: Counts) -> None:
    is_ready = todo > 0
    rows, todo = rows[is_ready], todo[is_ready]
    granted = _fitted(state, step, rows, _granted(state, step, rows, todo))
    decodes = rows[(granted > 0) & (todo == 1)]
    if len(decodes):
        launched = state.manager.rows.num_launched[decodes]
        _place_decodes(state, step, decodes, launched, launched + 1)
        state.manager.growth.draw_promised()
    is_chunk = (granted > 0) & (todo > 1)
    for row, most in zip(rows[is_chunk].tolist(), granted[is_chunk].tolist(), strict=True):
        place_chunk(state, step, state.columns.owner[row], row, most)


def _granted(state: State, step: Step, rows: Rows, todo: Counts) -> Counts:
    wanted = state.composition.wanted(state, rows, todo)
    if len(rows) <= step.seats and int(wanted.sum()) <= step.budget:
        return wanted
    order = state.composition.ranked(todo)[: step.seats]
    in_order = wanted[order]
    before = np.cumsum(in_order) - in_order
    granted = np.zeros(len(rows), np.int64)
    granted[order] = np.clip(step.budget - before, 0, in_order)
    return granted


def _fitted(state: State, step: Step, rows: Rows, granted: Counts) -> Counts:
    """Return what memory can hold of `granted`, after victims gave up the missing blocks."""
    manager, books, owed = state.manager, state.books, 0
    needs = books.lacking(rows, manager.rows.num_launched[rows] + granted)
    if books.bounded:
        owed = books.owed_to_bounded()
        if owed <= manager.device.num_available:
            # Their blocks are reserved: they neither compete nor count.
            needs[[state.columns.owner[row].is_bounded for row in rows.tolist()]] = 0
        else:
            # A cancelled batch took back shared blocks. Until the reservation is whole again, its request competes.
            owed = 0
    missing = int(needs.sum()) - (manager.device.num_available - owed)
    if missing <= 0:
        return granted
    if step.may_move:
        _take_from_victims(state, step, rows, granted, needs, missing)
    # Rows that still lack blocks leave this step, last in order first. Rows that have their blocks stay.
    fits = np.cumsum(needs) <= manager.device.num_available - owed
    return np.where(fits | (needs == 0), granted, 0)


def _take_from_victims(state: State, step: Step, rows: Rows, granted: Counts, needs: Counts, missing: int) -> None:
    """Preempt until nothing is missing; change `granted` and `needs`. The first request in order is no victim."""
    manager = state.manager
    place = {row: i for i, row in enumerate(rows.tolist())}
    first = next((s for s in state.running if any(row in place for row in s.rows)), None)
    for victim in victims(state):
        if missing <= 0:
            return
        if victim is first:
            continue
        own = [place[row] for row in victim.live_rows if row in place]
        own_need = int(needs[own].sum())
        if not state.victims.takes_whole and len(own) == 1 and granted[own[0]] > 1 and own_need >= missing:
            row, left = rows.item(own[0]), own_need - missing
            holds = (manager.rows.num_blocks.item(row) + left) * manager.block_size - manager.rows.num_launched.item(
                row
            )
            if holds > 0:
                granted[own[0]] = min(granted.item(own[0]), holds)
                needs[own[0]] = left
                return
        granted[own] = 0
        needs[own] = 0
        missing -= own_need
        missing -= preempt(state, step, victim, max(missing, 0))


def _leader_of(state: State, step: Step, request: RequestState, row: int) -> str | None:
    """Return the id of a request in this batch whose prompt goes on with this row's next block, or None."""
    manager, size = state.manager, state.manager.block_size
    if not step.leaders or not manager.prefix_caching or not request.request.reads_cache:
        return None
    have = manager.rows.num_blocks.item(row)
    start, stop = have * size, (have + 1) * size
    # Only a row that holds nodes alone can share by content, and every row computes at least one token.
    if manager.rows.num_launched[row] != start or stop > manager.rows.num_tokens[row] - 1:
        return None
    tokens, table = manager.rows.tokens, manager.rows.block_tables
    for leader, launched in step.leaders.items():
        other = state.columns.owner[leader]
        if leader == row or other.root != request.root or not launched < stop <= manager.rows.num_tokens[leader]:
            continue
        if not (tokens[leader, start:stop] == tokens[row, start:stop]).all():
            continue
        if (table[leader, :have] == table[row, :have]).all():
            return str(other.id)
    return None
