"""Who comes in: paused and swapped requests return first, then waiting ones are admitted, both in order.

A strategy is a subclass of `Admission`. Does not preempt: a waiting request takes nothing from anyone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .composition import place_chunk
from .policies import Policy
from .request import RequestState
from .state import State, Step
from .status import Status

NUM_PASSING = 4
"""Of so many behind the head of the queue, the first that fits may pass it, where the policy allows that."""


class Admission:
    """This one lets requests join at every step.

    joins       requests join those that run
    chunked     a prompt may be split over steps; else a request comes in when the budget is enough for all of it
    max_passes  how often a waiting request that does not fit is passed by one of the next four
    """

    joins = True

    def __init__(self, policy: Policy) -> None:
        self.chunked, self.max_passes = policy.chunked, policy.max_passes

    def let_in(self, state: State, step: Step) -> None:
        """Return and admit as budget, seats and memory allow; who does not fit is overtaken as often as the policy says."""
        was_shut, state.admission_blocked = state.admission_blocked, False
        if step.is_short or not step.may_move:
            # Memory was short a moment ago: a request that came in now would be the next victim.
            return
        was_empty = not state.running.num and not state.away.num
        if state.away.num:
            state.manager.growth.draw_promised()
        for request in list(state.away):
            if request.status is Status.LOADING:
                continue
            if step.budget <= 0 or state.outstanding.keeps_out(request):
                return
            if not _has_seats(state, step, request) or not _can_return(state, step, request):
                shut(state, step)
                return
            bring_back(state, step, request)
        self.admit_waiting(state, step, was_empty=was_empty, was_shut=was_shut)

    def admit_waiting(self, state: State, step: Step, *, was_empty: bool, was_shut: bool) -> None:
        """Admit from the queue. `was_empty`: nothing ran or was away before this step; `was_shut`: none could be admitted in the last one."""
        foresight = state.foresight
        if foresight is not None and not foresight.looks_now(step, was_shut):
            state.admission_blocked = was_shut
            return
        while state.waiting.num and step.budget > 0:
            has_to_wait = _admit_plain_ones(state, step)
            if not state.waiting.num or step.budget <= 0:
                return
            request = state.waiting.head()
            if not has_to_wait:
                state.manager.growth.draw_promised()
                if _may_enter(state, step, request):
                    admit(state, step, request)
                    continue
            behind = _one_behind(state, step, request)
            if behind is None and state.outstanding.keeps_out(request):
                # An update lets it in, though no request ends.
                return
            if behind is None:
                # Where prompts are computed whole, one that comes in this step may have left too little of the budget for the next one.
                if self.chunked or not step.chunks:
                    shut(state, step, request)
                return
            request.passed += 1
            tokens = behind.tokens[0]
            if behind.is_plain and tokens is not None and not step.leaders and _takes_plain_ones(state):
                _admit_plainly(state, step, behind, tokens)
            else:
                state.manager.growth.draw_promised()
                admit(state, step, behind)

    def begin_batch(self, state: State, requests: Sequence[RequestState]) -> None:
        """These waiting requests, with which nothing runs, are about to be admitted."""

    def reason(self, state: State) -> str | None:
        """Why requests for which there is room wait; None if they do not."""
        return None


def shut(state: State, step: Step, request: RequestState | None = None) -> None:
    """A request lacks memory or a seat. Steps that only decode make none: unless what the rows decode is what this request begins
    with."""
    if step.preempted or step.moves:
        return
    if state.foresight is not None:
        state.foresight.note_none_fits()
    if request is not None and state.manager.prefix_caching:
        tokens = next(tokens for tokens in request.tokens if tokens is not None)
        if state.manager.content.may_be_found(tokens, request.root):
            return
    state.admission_blocked = True


def _may_enter(state: State, step: Step, request: RequestState) -> bool:
    """Whether there are seats and memory for a waiting request, now and, where the policy looks ahead, later, and it has its tokens."""
    if not _has_seats(state, step, request) or not fits(state, step, request):
        return False
    if state.outstanding.keeps_out(request):
        return False
    return state.foresight is None or state.foresight.fits(request)


def _one_behind(state: State, step: Step, head: RequestState) -> RequestState | None:
    """The first of the next that may enter before the head of the queue, which may not; None if it has been passed often enough."""
    if head.passed >= state.admission.max_passes or step.seats <= 0:
        return None
    manager = state.manager
    takes_plain_ones = _takes_plain_ones(state) and state.running_rows.count() < state.limits.max_sequences
    free = _num_free(state, step) if takes_plain_ones else 0
    for request in state.waiting.behind(NUM_PASSING):
        if takes_plain_ones and request.is_plain:
            tokens = request.tokens[0]
            assert tokens is not None, "a waiting request keeps its tokens"
            has_room = -(-len(tokens) // manager.block_size) <= free
            if not has_room and free <= 0:
                continue
            if not manager.content.has_first(tokens, request.root):
                # Nothing of it is cached, so what is promised need not be drawn, and evict, before it is looked up.
                if has_room and (state.foresight is None or state.foresight.fits(request)):
                    return request
                continue
        manager.growth.draw_promised()
        if _may_enter(state, step, request):
            return request
    return None


def bring_back(state: State, step: Step, request: RequestState) -> None:
    """A paused or swapped request, for which there is room, runs again."""
    manager = state.manager
    state.queues.leave(request)
    state.books.bound_if_due(request)
    moves = manager.take_from_host(np.array(request.live_rows))
    step.admitted.append(request.id)
    if len(moves):
        step.moves.append(moves)
        step.has_swapped_in = True
        copied = moves.host_to_device
        state.stats.swapped_in_blocks += len(copied)
        request.swapped_blocks += len(copied)
    _start(state, step, request)


def _admit_plain_ones(state: State, step: Step) -> bool:
    """`_has_seats`, `fits` and `admit` for ordinary requests at the head of the queue, one call of the memory layer each: one
    sequence, never admitted before, nothing to load, reserve or wait for, no leader to follow.

    Returns whether the head has to wait; else the head now is not ordinary, or no request or no budget is left.
    """
    if not _takes_plain_ones(state):
        return False
    manager, waiting, size = state.manager, state.waiting, state.manager.block_size
    foresight = state.foresight
    running_rows, max_rows = state.running_rows, state.limits.max_sequences
    while waiting.num and step.budget > 0:
        request = waiting.head()
        if not request.is_plain or step.leaders or running_rows.count() >= max_rows:
            return False
        tokens = request.tokens[0]
        assert tokens is not None, "a waiting request keeps its tokens"
        num_tokens = len(tokens)
        if step.seats <= 0:
            return True
        free = _num_free(state, step)
        if -(-num_tokens // size) > free:
            # Sharing what a row holds takes nothing, so a prompt that is known may fit all the same.
            return not (free > 0 and manager.content.has_first(tokens, request.root))
        if foresight is not None and not foresight.fits(request):
            return True
        _admit_plainly(state, step, request, tokens)
    return False


def _takes_plain_ones(state: State) -> bool:
    """Whether an ordinary request needs no more than its prompt's blocks, and may enter in parts: it comes in the short way."""
    return state.admission.chunked and not state.reservation.reserves and not state.books.bounded


def _admit_plainly(state: State, step: Step, request: RequestState, tokens: NDArray[np.int32]) -> None:
    """`admit` for an ordinary request of these tokens, for which there is room, where this batch has no leader."""
    manager, num_tokens = state.manager, len(tokens)
    state.waiting.let_in(request)
    step.admitted.append(request.request.id)
    row, found, count = manager.admit(tokens, request.root, min(step.budget, state.limits.max_chunk))
    request.tokens[0] = None
    request.rows[0] = row
    request.hit_tokens = found
    request.is_plain = request.is_new = False
    state.columns.bind(row, request, 0)
    state.stats.prompt_tokens += num_tokens
    state.stats.admitted += 1
    state.start_running(request)
    is_whole = found + count == num_tokens
    step.chunks.append((row, found, count, is_whole))
    step.budget -= count
    step.seats -= 1
    if not is_whole:
        step.leaders[row] = found
        manager.growth.draw_promised()
        _add_debt(state, step, request)


def admit(state: State, step: Step, request: RequestState) -> None:
    """A waiting request, for which there is room, gets its rows."""
    state.waiting.let_in(request)
    state.books.bound_if_due(request)
    step.admitted.append(request.id)
    is_loading = False
    for sequence, tokens in enumerate(request.tokens):
        if tokens is None:
            continue
        row = state.open_row(request, sequence)
        if request.is_new:
            state.stats.prompt_tokens += len(tokens)
        state.reservation.take(state.books, request, sequence)
        is_loading = request.wants_load and _ask_for_load(state, step, request, row)
        if is_loading:
            continue
        if request.num_live > 1 and step.budget > 0 and step.seats > 0:
            # The next sequence of the group looks for what this one computes, so it has to be placed first.
            place_chunk(state, step, request, row)
    if request.is_new:
        state.stats.admitted += 1
        request.is_plain = request.is_new = False
    if is_loading:
        state.queues.suspend(request, Status.LOADING)
        _add_debt(state, step, request)
        return
    _start(state, step, request, is_fresh=request.num_live == 1)


def _start(state: State, step: Step, request: RequestState, *, is_fresh: bool = False) -> None:
    state.start_running(request)
    manager = state.manager
    follows, is_placed = None, not (request.is_bounded or state.reservation.is_counted)
    for row in request.rows:
        if row < 0 or manager.is_placed(row):
            continue
        todo = state.outstanding.total_of(row) - int(manager.rows.num_launched[row])
        if todo <= 0:
            continue
        if step.budget <= 0 or place_chunk(state, step, request, row, is_fresh=is_fresh) < todo:
            is_placed = False
        follows = follows or request.follows
    is_placed_now = any(row >= 0 and manager.is_placed(row) for row in request.rows)
    request.follows = None if is_placed_now else follows
    if not is_placed or len(request.rows) > 1:
        _add_debt(state, step, request)


def _add_debt(state: State, step: Step, request: RequestState) -> None:
    if request.is_bounded:
        # Reserved beyond what it knows; counted afresh, since it is rare.
        step.owed = None
    elif step.owed is not None:
        step.owed += state.books.debt_of(request)


def _ask_for_load(state: State, step: Step, request: RequestState, row: int) -> bool:
    """List the blocks for tokens whose KV exists elsewhere; the request is loading until they are reported."""
    manager, size = state.manager, state.manager.block_size
    request.wants_load = False
    have = int(manager.rows.num_launched[row])
    wanted = min(request.request.num_computed, int(manager.rows.num_tokens[row]) - 1)
    if (
        wanted <= have
        or state.books.blocks_for(wanted) - int(manager.rows.num_blocks[row]) > manager.device.num_available
    ):
        return False
    manager.reserve_rows(np.array([row]), np.array([state.books.blocks_for(wanted)]))
    first = have // size
    for column, block in enumerate(manager.rows.table(row)[first:].tolist(), first):
        if column * size < wanted:
            step.loads.append((row, column * size, block))
    request.num_asked = wanted - have
    step.asked.append(request)
    return True


def _has_seats(state: State, step: Step, request: RequestState) -> bool:
    """Whether its sequences may be in flight beside those that run."""
    if request.num_live > step.seats:
        return False
    if state.running_rows.count() + request.num_live <= state.limits.max_sequences:
        return True
    rows, manager = state.running_rows.array(state.running), state.manager
    # Rows that wait for tokens from the caller take no seat.
    launched = manager.rows.num_launched[rows]
    is_idle = (manager.rows.num_tokens[rows] == launched) & (manager.rows.num_computed[rows] == launched)
    return len(rows) - int(np.count_nonzero(is_idle)) + request.num_live <= state.limits.max_sequences


def watermark(state: State) -> int:
    """Blocks that newcomers leave available: a share of the pool, and where admission looks ahead less of it with many rows."""
    if not state.running.num:
        return 0
    return (
        state.books.watermark_blocks
        if state.foresight is None
        else int(state.books.watermark_blocks * state.foresight.spread())
    )


def _can_return(state: State, step: Step, request: RequestState) -> bool:
    needed = state.books.to_return(request)
    return needed + owed(state, step) + watermark(state) <= state.manager.device.num_available


def owed(state: State, step: Step) -> int:
    """Blocks that those who were admitted still need for what they were admitted with."""
    if step.owed is None:
        state.manager.growth.draw_promised()
        step.owed = state.books.owed()
    return step.owed


def _num_free(state: State, step: Step) -> int:
    """Blocks that an ordinary newcomer may have."""
    return state.manager.growth.num_unpromised - owed(state, step) - watermark(state)


def fits(state: State, step: Step, request: RequestState) -> bool:
    """Whether there is memory for a waiting request now, and budget where its prompt has to be computed whole."""
    manager = state.manager
    kept = watermark(state)
    if manager.device.num_available <= kept:
        # At least one block is always drawn, so what is owed need not even be asked.
        return False
    free = manager.device.num_available - owed(state, step) - kept
    needed = state.books.to_enter(request)
    if needed > free:
        if not manager.prefix_caching or free <= 0 or not request.request.reads_cache:
            return False
        tokens = next(tokens for tokens in request.tokens if tokens is not None)
        # A block that another batch may yet take back cannot stand in for one that is promised.
        is_promised = state.reservation.is_counted or state.books.is_due(request)
        needed -= manager.content.held_prefix(tokens, request.root, confirmed=is_promised)
        if needed > free:
            return False
    if not state.reservation.has_place(state.books, request):
        return False
    if state.admission.chunked or not step.num_rows:
        return True
    longest = max(len(tokens) for tokens in request.tokens if tokens is not None)
    return longest <= step.budget
