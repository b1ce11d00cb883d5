"""Composition of a step: how many tokens each row computes. A row with one token to go decodes; one with more computes
a chunk. Victims give up blocks before rows are placed: a placed row stays."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from paged.base.arguments import UNLIMITED
from paged.base.growing import ones
from paged.block_manager import Memory
from paged.errors import OutOfBlocks

from .preemption import preempt
from .queues import Queues
from .request import RequestState
from .rows import Counts, Rows
from .state import State, Step


class Composition:
    """Running requests in order, then newcomers. Other strategies are subclasses. `decodes_first`: decodes come before
    chunks of prompts, as in Dynamic SplitFuse. `one_token_each`: from some position on, a row computes one token a
    step, even of its prompt, and no drafts."""

    decodes_first = one_token_each = False

    def __init__(self, *, decodes_first: bool = False) -> None:
        self.decodes_first = decodes_first

    def compose(self, state: State, step: Step) -> None:
        if state.running.num:
            compose_running(state, step)
        if state.waiting.num or state.away.num:
            state.admission.let_in(state, step)

    def wanted(self, manager: Memory, rows: Rows, todo: Counts) -> Counts:
        """Return how many of its `todo` tokens each row may compute in one step, before any limit, int64 [n]."""
        return todo

    def reason(self, queues: Queues) -> str | None:
        """Return a sentence: why requests wait although there is room for them. None if they need not wait."""
        return None


def compose_running(state: State, step: Step) -> None:
    """Place the running rows, decodes first, as budget, seats and memory allow. Their blocks may stay promised."""
    manager, outstanding, running = state.manager, state.outstanding, state.running
    rows, steady, todo, after = running.rows(), running.take_steady(), None, -1
    decodes = None if steady is None else (rows, *steady)
    if outstanding.batches:
        decodes = outstanding.steady_source(rows, running.version)
        after = -1 if decodes is None else outstanding.batches[-1].number
    if decodes is None:
        # A steady step skips these gathers: a decode step of 1,024 rows in `paged bench scheduler`.
        launched = manager.rows.num_launched[rows]
        todo, one = outstanding.totals_of(rows) - launched, ones(len(rows))
        decodes = (rows, launched, launched + one) if todo.tobytes() == one.tobytes() else None
    if decodes is not None and len(rows) <= step.budget and len(rows) <= step.seats and not state.books.bounded:
        try:
            manager.place(*decodes, one_each=True)
        except OutOfBlocks:
            # Nothing changed. Victims give up blocks below.
            pass
        else:
            step.place_decodes(rows, decodes[1], after=after)
            if not outstanding.batches and not state.away.num and not state.reservation.is_counted:
                state.books.set_owed(0)
            return
    _compose_in_parts(state, step, rows, ones(len(rows)) if todo is None else todo)


def place_chunk(
    state: State, step: Step, request: RequestState, row: int, *, most: int = UNLIMITED, is_fresh: bool = False
) -> int:
    """Extend the row's hit, unless it is done (`is_fresh`). Place its next tokens, at most `most`, as limits and memory
    allow; none if a row of this batch computes its next block, which it shares later. Return how many."""
    manager = state.manager
    if not is_fresh:
        is_first_life = request.preemptions == 0
        room = state.books.allowance(request) if manager.host_caching else None
        num_won = manager.sharing.extend_hit(row, count=is_first_life, room=room)
        if is_first_life and num_won:
            request.count("hit_tokens", num_won)
    launched = manager.rows.num_launched.item(row)
    num_loaded = step.loads_to.pop(row, launched) - launched if step.loads_to else 0
    request.follow(None if num_loaded else _leader_of(manager, step, request, row))
    if request.follows is not None:
        return 0
    todo = state.outstanding.total_of(row) - launched
    holds = manager.tokens_within(row, state.books.allowance(request))
    wanted = state.composition.wanted(manager, np.array([row]), np.array([todo])).item()
    most = min(most, state.limits.max_chunk, wanted)
    count = min(todo, num_loaded + min(step.budget, most), holds - launched)
    if count <= num_loaded or step.seats <= 0:
        return 0
    if manager.layout.states:
        count = manager.next_end(row, launched, launched + count) - launched
    manager.place_one(row, count)
    step.note_chunk(request, row, launched, count, is_whole=count == todo, num_loaded=num_loaded)
    if num_loaded:
        size, table = manager.block_size, manager.rows.table(row).tolist()
        stop = state.books.blocks_for(launched + num_loaded)
        step.loads.extend((row, column * size, table[column]) for column in range(launched // size, stop))
    return count


def _compose_in_parts(state: State, step: Step, rows: Rows, todo: Counts) -> None:
    manager, composition = state.manager, state.composition
    is_ready = todo > 0
    rows, todo = rows[is_ready], todo[is_ready]
    granted = np.minimum(composition.wanted(manager, rows, todo), state.limits.max_chunk)
    if len(rows) > step.seats or int(granted.sum()) > step.budget:
        is_later = todo > 1 if composition.decodes_first else np.zeros(len(rows), np.bool_)
        order = is_later.argsort(kind="stable")[: step.seats]
        wanted, granted = granted[order], np.zeros(len(rows), np.int64)
        granted[order] = np.clip(step.budget - (np.cumsum(wanted) - wanted), 0, wanted)
    granted = _fitted(state, step, rows, granted)
    decodes = rows[(granted > 0) & (todo == 1)]
    if len(decodes):
        starts = manager.rows.num_launched[decodes]
        manager.place(decodes, starts, starts + 1, one_each=True)
        step.place_decodes(decodes, starts)
        manager.growth.draw_promised()
    is_chunk = (granted > 0) & (todo > 1)
    for row, most in zip(rows[is_chunk].tolist(), granted[is_chunk].tolist(), strict=True):
        place_chunk(state, step, state.columns.owner[row], row, most=most)


def _fitted(state: State, step: Step, rows: Rows, granted: Counts) -> Counts:
    """Return how many of its `granted` tokens memory holds of each row, after victims gave up the missing blocks."""
    manager, books = state.manager, state.books
    needs = manager.growth.lacking(rows, manager.rows.num_launched[rows] + granted)
    owed = books.owed_to_bounded()
    if owed > manager.device.num_available:
        # A cancelled batch took back shared blocks: the worst cases lack some, and their requests compete for now.
        owed = 0
    elif books.bounded:
        # Blocks are reserved for bounded requests: they neither compete nor count.
        needs[[state.columns.owner[row] in books.bounded for row in rows.tolist()]] = 0
    if int(needs.sum()) <= manager.device.num_available - owed:
        return granted
    # With counted reservations, only what windows hold beyond them is missing. It comes back when a batch ends.
    waits = state.reservation.is_counted and bool(state.outstanding.batches) and bool(manager.layout.bounded)
    if not state.carried.groups and not waits:
        _take_from_victims(state, step, rows, granted=granted, needs=needs, owed=owed)
    # Rows that still lack blocks leave this step, last in order first. Rows that have their blocks stay.
    fits = np.cumsum(needs) <= manager.device.num_available - owed
    return np.where(fits | (needs == 0), granted, 0)


def _take_from_victims(state: State, step: Step, rows: Rows, *, granted: Counts, needs: Counts, owed: int) -> None:
    """Preempt until the blocks that the rows need are available, beside `owed` ones. A victim's `granted` and `needs`
    become 0. Spared: the first request in order that asks, and those before it that go on after outstanding samples."""
    manager = state.manager
    place = {row: i for i, row in enumerate(rows.tolist())}
    first = state.columns.owner[rows[0]]
    spared = [first, *filter(state.outstanding.goes_on, takewhile(lambda other: other is not first, state.running))]
    for victim in state.victims.candidates(state.books, lambda other: other not in state.books.bounded):
        missing = int(needs.sum()) - (manager.device.num_available - owed)
        if missing <= 0:
            return
        if victim in spared:
            continue
        own = [place[row] for row in victim.live_rows if row in place]
        left = int(needs[own].sum()) - missing
        if left >= 0 and not state.victims.takes_whole and len(own) == 1 and granted[own[0]] > 1:
            # The victim may go on with fewer tokens.
            row = rows.item(own[0])
            holds = manager.tokens_within(row, left) - manager.rows.num_launched.item(row)
            if holds > 0:
                granted[own[0]] = min(granted.item(own[0]), holds)
                needs[own[0]] = left
                return
        granted[own] = 0
        needs[own] = 0
        preempt(state, step, victim, max(-left, 0))


def _leader_of(manager: Memory, step: Step, request: RequestState, row: int) -> str | None:
    """Return the id of a request in this batch that computes this row's next block, now or later; None without one."""
    if not step.leaders or not manager.prefix_caching or not request.request.reads_cache:
        return None
    size, tables = manager.block_size, manager.rows
    have = tables.num_blocks.item(row)
    start, stop = have * size, (have + 1) * size
    # To share by content, a row must hold only nodes. At least its last token is left for it to compute.
    if tables.num_launched[row] != start or stop > tables.num_tokens[row] - 1:
        return None
    for other, leader, launched in step.leaders:
        if (
            leader != row
            and other.root == request.root
            and launched < stop <= tables.num_tokens[leader]
            and (tables.tokens[leader, start:stop] == tables.tokens[row, start:stop]).all()
            and (tables.block_tables[leader, :have] == tables.block_tables[row, :have]).all()
        ):
            return other.id
    return None
