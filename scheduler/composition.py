"""What the running requests do in this step: one recurrence, by which num_computed catches up with num_tokens.

A row with one token to go is a decode, with more a chunk of its prompt; resuming, a prefix hit and draft tokens need
no case of their own. Who runs is decided first, and memory made for it; then rows are placed, and nothing placed is
taken out again. A strategy is a subclass of `Composition`.
"""

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
    """int64 [count] of 1, a read-only view that all batches of the process share."""
    return _ONES.first(count)


class Composition:
    """This one serves the running requests in order, whatever each has to compute, and then newcomers.

    one_token_each  from some position on each row computes one token a step, also in the middle of its prompt: no drafts
    """

    one_token_each = False

    def compose(self, state: State, step: Step) -> None:
        """Fill the step."""
        if state.running.num:
            compose_running(state, step)
        if state.waiting.num or state.away.num:
            state.admission.let_in(state, step)

    def wanted(self, state: State, rows: Rows, todo: Counts) -> Counts:
        """Tokens that each row may compute in one step, of those that it has to, whatever the budget."""
        return np.minimum(todo, state.limits.max_chunk)

    def ranked(self, todo: Counts) -> Counts:
        """The places of rows with so many tokens to go, in the order in which they get the budget."""
        return np.arange(len(todo))

    def most(self, state: State, num_launched: int) -> int:
        """Tokens that one row may compute in one step, after so many."""
        return state.limits.max_chunk

    def reason(self, state: State) -> str | None:
        """Why requests for which there is room wait; None if they do not."""
        return None


class DecodesFirst(Composition):
    """Decodes, then chunks of prompts, as Dynamic SplitFuse does."""

    def ranked(self, todo: Counts) -> Counts:
        is_decode = todo == 1
        return np.concatenate([is_decode.nonzero()[0], (~is_decode).nonzero()[0]])


def compose_running(state: State, step: Step) -> None:
    """Place the running requests' rows, decodes first, as budget, seats and memory allow. Their blocks may be promised only."""
    manager, outstanding, rows = state.manager, state.outstanding, state.running_rows.array(state.running)
    decodes, state.steady = state.steady, None
    todo: Counts | None = None
    if outstanding.batches:
        decodes = _steady_ahead(state, rows)
    is_ahead = outstanding.batches and decodes is not None
    if decodes is None or decodes[0] is not rows:
        # Else nothing need be gathered: a decode step of 1,024 rows in `paged bench scheduler`.
        launched = manager.rows.num_launched[rows]
        todo = outstanding.totals_of(rows) - launched
        decodes = None if np.count_nonzero(todo != 1) else (rows, launched, launched + 1)
    if decodes is not None and len(rows) <= step.budget and len(rows) <= step.seats and not state.books.bounded:
        try:
            _place_decodes(state, step, *decodes)
        except OutOfBlocks:
            # Nothing changed: a victim has to give blocks up first.
            pass
        else:
            if is_ahead:
                step.decodes_after = outstanding.batches[-1].number
            elif not outstanding.batches and not state.away.num and not state.reservation.is_counted:
                # Each has the blocks for all that it knows.
                state.books.owe_nothing()
            return
    _compose_in_parts(state, step, rows, ones(len(rows)) if todo is None else todo)


def _steady_ahead(state: State, rows: Rows) -> tuple[Rows, Counts, Counts] | None:
    """The running rows with what each has launched and one token more, where the batch before has them all, a token is sampled for
    each of them there, and none ends with it at its full length."""
    ticket = state.outstanding.steady_source(rows)
    if ticket is None or state.silent:
        return None
    ends = ticket.ends + 1
    return None if state.columns.reach_length(rows, ends) else (rows, ticket.ends, ends)


def _place_decodes(state: State, step: Step, rows: Rows, starts: Counts, ends: Counts) -> None:
    """Put a token of each row in flight, `starts` before it and `ends` with it. Their blocks are promised."""
    moves = state.manager.place(rows, starts, ends, one_each=True)
    step.decodes, step.decode_starts, step.decode_ends = rows, starts, ends
    step.budget -= len(rows)
    step.seats -= len(rows)
    if moves is not NO_MOVES and len(moves):
        step.moves.append(moves)


def place_chunk(
    state: State, step: Step, request: RequestState, row: int, most: int = UNLIMITED, *, is_fresh: bool = False
) -> int:
    """Put the row's next tokens in flight, at most `most`, the budget and what its memory holds. Returns how many.

    Looks its prefix up again first, unless that has just been done (`is_fresh`), and places nothing if another row of this
    batch is about to compute what comes next.
    """
    manager = state.manager
    if not is_fresh:
        is_first_life = request.preemptions == 0
        room = state.books.allowance(request) if manager.host_caching else None
        num_won = manager.extend_hit(row, count=is_first_life, room=room)
        if is_first_life:
            request.hit_tokens += num_won
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
    """Place what fits of rows that have so many tokens to go."""
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
    """Tokens for each row by budget, seats and the policy's composition."""
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
    """What of `granted` memory can hold, after taking from victims what is missing."""
    manager, books, owed = state.manager, state.books, 0
    needs = books.lacking(rows, manager.rows.num_launched[rows] + granted)
    if books.bounded:
        owed = books.owed_to_bounded()
        if owed <= manager.device.num_available:
            # Their blocks are reserved: they neither compete nor count.
            needs[[state.columns.owner[row].is_bounded for row in rows.tolist()]] = 0
        else:
            # A cancelled batch took back what one of them shared: until it is whole again it competes as everybody does.
            owed = 0
    missing = int(needs.sum()) - (manager.device.num_available - owed)
    if missing <= 0:
        return granted
    if step.may_move:
        _take_from_victims(state, step, rows, granted, needs, missing)
    # Rows that still lack blocks stay out of this step, the last in order first; who owns its memory already stays in.
    fits = np.cumsum(needs) <= manager.device.num_available - owed
    return np.where(fits | (needs == 0), granted, 0)


def _take_from_victims(state: State, step: Step, rows: Rows, granted: Counts, needs: Counts, missing: int) -> None:
    """Preempt until nothing is missing; a victim's own need goes first. Changes `granted` and `needs`.

    The first request in order is never its own victim.
    """
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
            # It computes what it can with fewer more blocks.
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
    """The request, placed in this very batch, whose prompt goes on past it with this row's next block; None if there is none."""
    manager, size = state.manager, state.manager.block_size
    if not step.leaders or not manager.prefix_caching or not request.request.reads_cache:
        return None
    have = manager.rows.num_blocks.item(row)
    start, stop = have * size, (have + 1) * size
    # Only a row that stands on nodes alone can take another block by content, and one token is always computed.
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
