"""Admission of requests: first those that return, then those that wait, both in order; and forks. It preempts only
where a step would compute nothing: then the first request that can run gets the blocks that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from paged.errors import InvalidRequest, RequestInFlight

from .composition import place_chunk
from .ending import end_request
from .policies import Policy
from .preemption import preempt
from .queues import Queue
from .request import LENGTH, RequestState, Status, wrong
from .reservations import Books
from .state import Limits, State, Step

NUM_PASSING = 4
"""If the policy allows it, the first that fits of so many requests behind the head of the queue may pass the head."""
_NOTHING = 0, True  # the answer of `_ask` where no token exists elsewhere
_NONE_JOIN = "lets no sequence join those that run"


class Admission:
    """Admission at every step. Other strategies are subclasses. `joins`: requests may join those that run. `chunked`: a
    prompt may be split over steps; otherwise it has to fit into one budget. `max_passes`: see `Policy`."""

    joins = True

    def __init__(self, policy: Policy) -> None:
        self.chunked, self.max_passes = policy.chunked, policy.max_passes

    def let_in(self, state: State, step: Step) -> None:
        """Bring requests back, then admit waiting ones, as budget, seats and memory allow."""
        books, was_shut = state.books, state.queues.is_shut
        state.queues.reopen()
        if step.is_short or state.carried.groups:
            # Memory was just short: a request admitted now would be the next victim.
            return
        for request in list(state.away):
            if request.status is Status.LOADING:
                continue
            if step.budget <= 0 or state.outstanding.keeps_out(request):
                return
            state.manager.growth.draw_promised()
            if not _has_seats(state, step, request) or books.to_return(request) > books.free_for(request):
                shut(state, step)
                return
            bring_back(state, step, request)
        if state.foresight is None or state.foresight.looks_now(step.num_rows, was_shut):
            self.admit_waiting(state, step)
        elif was_shut:
            state.queues.shut()

    def admit_waiting(self, state: State, step: Step) -> None:
        """Admit requests from the queue. All paused and swapped requests have returned before."""
        waiting = state.waiting
        while waiting.num and step.budget > 0:
            head = waiting.head()
            request = _first_to_enter(state, step, head, may_pass=head.passed < self.max_passes and step.seats > 0)
            if request is None:
                # Still open if the head waits for its own samples, or if whole prompts used up this budget.
                if not state.outstanding.keeps_out(head) and (self.chunked or not step.chunks):
                    shut(state, step, head)
                return
            if request is not head:
                head.count("passed")
            admit(state, step, request)

    def begin_batch(self, limits: Limits, requests: Sequence[RequestState]) -> None:
        """Prepare for the admission of these waiting requests while nothing runs."""


def shut(state: State, step: Step, request: RequestState | None = None) -> None:
    """Stop admission until a request ends or comes, unless running rows may compute a prefix that `request` can hit."""
    if step.preempted or step.moves:
        return
    if state.foresight is not None:
        state.foresight.note_none_fits()
    if request is None or not state.manager.content.may_be_found(request.first_tokens, request.root):
        state.queues.shut()


def _are_ordinary(state: State, step: Step) -> bool:
    """Whether plain requests can enter the short way: by chunks, with no reservation and no leader to follow."""
    return state.admission.chunked and not (state.reservation.reserves or step.leaders or state.books.bounded)


def _first_to_enter(state: State, step: Step, head: RequestState, *, may_pass: bool) -> RequestState | None:
    """Return the first request that may enter: the head of the queue or, if they `may_pass` it, one behind it."""
    are_ordinary = state.running.num_rows < state.limits.max_sequences and _are_ordinary(state, step)
    free = state.books.num_free() if are_ordinary else None
    if _may_enter(state, step, head, free, is_head=True):
        return head
    behind = state.waiting.behind(NUM_PASSING) if may_pass else ()
    return next((request for request in behind if _may_enter(state, step, request, free, is_head=False)), None)


def _may_enter(state: State, step: Step, request: RequestState, free: int | None, *, is_head: bool) -> bool:
    """Whether a waiting request has seats, and memory now and at the peak. `free`: blocks, if the short way is open."""
    has_room: bool | None = None
    if free is not None and request.is_plain:
        has_room = _has_plain_room(state.books, request, free, is_head=is_head)
    if has_room is None:
        if not _has_seats(state, step, request):
            return False
        state.manager.growth.draw_promised()
        has_room = state.books.has_room(request) and not state.outstanding.keeps_out(request)
        if step.num_rows and not state.admission.chunked:
            # A whole prompt has to fit into what is left of the budget.
            has_room &= max(len(tokens) for tokens in request.tokens if tokens is not None) <= step.budget
    return has_room and (state.foresight is None or state.foresight.fits(request))


def _has_plain_room(books: Books, request: RequestState, free: int, *, is_head: bool) -> bool | None:
    """Return whether `free` blocks hold a plain request without what is cached; None if its cached prefix may count:
    one that lacks blocks shares it, and one that passes the head must not draw blocks that it hits."""
    # For most requests, no promised blocks are drawn first: `benchmarks/compare.py --only churn`.
    has_room = books.blocks_for(len(request.first_tokens)) + books.manager.layout.spare_pages <= free
    may_share = not is_head if has_room else free > 0
    if may_share and books.manager.content.has_first(request.first_tokens, request.root):
        return None
    return has_room


def bring_back(state: State, step: Step, request: RequestState) -> None:
    """Run a paused or swapped request again; there is room for it."""
    state.queues.leave(request)
    state.books.bound_if_due(request)
    moves = state.manager.tiers.swap_in(np.array(request.live_rows))
    step.admitted.append(request.id)
    step.move(moves)
    state.stats.count("swapped_in_blocks", len(moves.host_to_device))
    request.count("swapped_blocks", len(moves.host_to_device))
    _start(state, step, request)


def admit(state: State, step: Step, request: RequestState) -> None:
    """Give a waiting request its rows and place what the budget allows; there is room for it."""
    has_sides = bool(state.manager.layout.sides)
    keep_at, level = (_lengths_to_keep(state.waiting, request), _level(state, request)) if has_sides else ((), 0)
    state.waiting.let_in(request)
    step.admitted.append(request.id)
    elsewhere: tuple[int, bool] | None = _NOTHING
    if request.num_loading is None or (state.elsewhere is not None and request.request.num_computed > 0):
        # How many tokens exist behind its hit is asked when it has a row. Most often nothing is hit, nor elsewhere.
        may_hit = not request.is_plain or state.manager.content.has_first(request.first_tokens, request.root)
        elsewhere = _ask(state, request, None) if has_sides else None if may_hit else _ask(state, request, 0)
    if request.is_plain and elsewhere == _NOTHING and _are_ordinary(state, step):
        _admit_plain(state, step, request, keep_at, level)
        return
    state.manager.growth.draw_promised()
    state.books.bound_if_due(request)
    its, is_new, is_loading, num_known = request.request, request.is_new, False, 0
    for sequence, tokens in enumerate(request.tokens):
        if tokens is None:
            continue
        # What is loaded of layers of several kinds begins with the first token.
        reads, writes = its.reads_cache and not (has_sides and elsewhere != _NOTHING), its.writes_cache
        row = state.manager.add_counted(
            tokens, request.root, count=is_new, reads=reads, writes=writes, keep_at=keep_at, level=level
        )
        state.seat(request, sequence, row, state.manager.rows.num_launched.item(row))
        num_known += len(tokens)
        state.reservation.take(state.books, request, sequence)
        is_loading = elsewhere != _NOTHING and _load(state, step, request, row, elsewhere)
        if not is_loading and request.num_live > 1 and step.budget > 0:
            # The next sequence of the group shares what this one computes, so this one is placed first.
            place_chunk(state, step, request, row)
    if is_new:
        state.stats.count_admission(num_known)
        request.admitted()
    if is_loading:
        state.queues.suspend(request, Status.LOADING)
        state.books.owe(request)
    else:
        _start(state, step, request, is_fresh=request.num_live == 1)


def _admit_plain(state: State, step: Step, request: RequestState, keep_at: Sequence[int], level: int) -> None:
    """Admit an ordinary request in one call, whose blocks are drawn together with those of others."""
    # What it saves: `benchmarks/compare.py --only churn`.
    known, most = request.first_tokens, min(step.budget, state.limits.max_chunk)
    row, found, count = state.manager.admit(known, request.root, most, keep_at=keep_at, level=level)
    state.seat(request, 0, row, found)
    state.stats.count_admission(len(known))
    request.admitted()
    state.queues.run(request, state.stats.steps)
    is_whole = found + count == len(known)
    step.note_chunk(request, row, found, count, is_whole=is_whole)
    if not is_whole:
        state.manager.growth.draw_promised()
        state.books.owe(request)


def _level(state: State, request: RequestState) -> int:
    """Return the level at which the request's content will be retained, 0 to 3."""
    its = request.request
    wishes = [] if its.retention is None else [its.retention]
    if its.session_id is not None:
        wishes.append(state.hints.sessions.by_id[its.session_id].retention)
    return max([int(wish.priority) for wish in wishes], default=0)


def _lengths_to_keep(waiting: Queue, request: RequestState) -> Sequence[int]:
    """Return the lengths of a prompt at which others may begin: those of `keep_at`, and where it differs from the next
    waiting prompts. Windows and states are kept there."""
    tokens, lengths = request.first_tokens, list(request.request.keep_at)
    for other in (waiting.head(), *waiting.behind(NUM_PASSING)):
        if other is not request and other.root == request.root:
            num = min(len(tokens), len(other.first_tokens))
            differs = tokens[:num] != other.first_tokens[:num]
            lengths.append(int(differs.argmax()) if differs.any() else num)
    return lengths


def _start(state: State, step: Step, request: RequestState, *, is_fresh: bool = False) -> None:
    """Put a request with rows among the running ones, and place its rows that are not placed yet."""
    state.queues.run(request, state.stats.steps)
    manager, rows = state.manager, request.live_rows
    follows, is_whole = None, not (request in state.books.bounded or state.reservation.is_counted)
    for row in rows:
        todo = 0 if manager.is_placed(row) else state.outstanding.total_of(row) - manager.rows.num_launched.item(row)
        if todo <= 0:
            continue
        if step.budget <= 0 or place_chunk(state, step, request, row, is_fresh=is_fresh) < todo:
            is_whole = False
        follows = follows or request.follows
    request.follow(None if any(map(manager.is_placed, rows)) else follows)
    if not is_whole or len(request.rows) > 1:
        state.books.owe(request)


def _ask(state: State, request: RequestState, have: int | None) -> tuple[int, bool]:
    """Ask how many tokens behind the first `have` exist elsewhere, and whether they come late (by `loaded`). None: with
    layers of several kinds, how many tokens, from the first on, are loaded in place of the cached ones."""
    manager, its = state.manager, request.request
    request.await_load(0)
    if have is None:
        have = manager.content.hit_end(request.first_tokens, request.root).num_tokens if its.reads_cache else 0
        num, _ = _ask(state, request, have)
        # Windows hold all blocks until the load is over.
        pages = -(-(have + num) // manager.block_size) * manager.layout.block_pages + manager.layout.state_pages
        pages = max(pages, state.books.to_enter(request))
        fits = 0 < num < len(request.first_tokens) - have and pages <= state.books.free_for(request)
        return (have + num, True) if fits else _NOTHING
    if state.elsewhere is None:
        return its.num_computed - have, True
    num, is_late = state.elsewhere(request.id, have)
    return (num, is_late) if num > 0 else _NOTHING


def _load(state: State, step: Step, request: RequestState, row: int, elsewhere: tuple[int, bool] | None) -> bool:
    """Note which tokens of the row come from elsewhere. Return whether it waits for them: then blocks for them are
    reserved and listed now. If they come early, they are listed when the row is placed. `elsewhere`: None: asked now."""
    manager, size = state.manager, state.manager.block_size
    have, known = manager.rows.num_launched.item(row), manager.rows.num_tokens.item(row)
    num_more, is_late = elsewhere or _ask(state, request, have)
    # At least the last token is computed here.
    stop = min(have + num_more, known - 1)
    if not is_late:
        step.load(row, stop)
        return False
    # A caller that is asked fills all that exists elsewhere, with the last token.
    num_blocks = -(-(stop if state.elsewhere is None else min(have + num_more, known)) // size)
    num_lacking = (num_blocks - manager.rows.num_blocks.item(row)) * manager.layout.block_pages
    if stop <= have or num_lacking > manager.device.num_available:
        return False
    manager.reserve_rows(np.array([row]), np.array([num_blocks]))
    table = manager.rows.table(row)[:num_blocks].tolist()
    step.loads.extend((row, column * size, table[column]) for column in range(have // size, num_blocks))
    request.await_load(stop - have)
    return True


def _has_seats(state: State, step: Step, request: RequestState) -> bool:
    if request.num_live > step.seats:
        return False
    num_free = state.limits.max_sequences - request.num_live
    if state.running.num_rows <= num_free:
        return True
    rows, tables = state.running.rows(), state.manager.rows
    # Rows that wait for tokens from the caller take no seat.
    launched = tables.num_launched[rows]
    is_idle = (tables.num_tokens[rows] == launched) & (tables.num_computed[rows] == launched)
    return len(rows) - int(np.count_nonzero(is_idle)) <= num_free


def fork(state: State, request: RequestState, sequence: int) -> int:
    """Carry out `Scheduler.fork`. The next batch copies the partial block, because both sequences will write there."""
    if request.status is not Status.RUNNING:
        raise InvalidRequest(f'request "{request.id}" is {request.status.value}; only sequences that run have forks.')
    if state.outstanding.computes(request) or state.outstanding.is_busy(request.id):
        raise RequestInFlight(request.id)
    if request.request.is_private or request.request.saves:
        raise wrong(request.id, "a request that shares nothing with others, or saves its blocks, has no forks.")
    seats = state.limits.max_sequences
    if state.reservation.reserves or not state.admission.joins:
        does = "reserves what a request may become at worst" if state.reservation.reserves else _NONE_JOIN
        raise wrong(request.id, f'policy "{state.policy.name}" {does}; it has no forks.')
    if state.running.num_rows >= seats:
        raise wrong(request.id, f"{state.running.num_rows} sequences run already; max_sequences is {seats}.")
    row = request.rows[sequence]
    state.columns.ensure(state.columns.num_bound + 1)
    # An outstanding batch may be cancelled, and then its moves would run together with copies planned now.
    state.manager.growth.copies.allow_content(not state.outstanding.batches and state.carried.are_of_forks)
    child, copies = state.manager.fork_to_write(row)
    number = request.add_fork(sequence, child)
    state.columns.bind(child, request, number)
    if row in state.columns.recovering:
        state.columns.recover(child, 0)
    state.running.add_row()
    # The reserved worst case does not include the new sequence.
    state.books.lift_bound(request)
    for source, copy in copies.tolist():
        state.carried.add_copy(source, copy)
    return number


def force_progress(state: State, step: Step) -> None:
    """Run the first request that has work and for which there can be room; end those that outgrew the pool."""
    books, queues = state.books, state.queues
    admitted = [request for request in (*queues.running, *queues.away) if request.status is not Status.LOADING]
    while able := sorted((r for r in admitted if state.outstanding.has_todo(r)), key=lambda request: request.order):
        # All are tried: the first may lack just the blocks that are reserved for a later one.
        if any(_make_room(state, step, request) and _run(state, step, request) for request in able):
            return
        if state.outstanding.held_blocks() or any(other.status is Status.LOADING for other in queues.away):
            # Blocks come back when the caller has loaded, or saved.
            return
        if able[0].num_live > 1 and any(map(state.manager.index.is_behind, able[0].live_rows)):
            # Its sequences may not share what was swapped before it was confirmed. Computed again, it is shared.
            preempt(state, step, able[0], 0, may_swap=False)
            continue
        sentence = "ended with length: alone in the pool, it outgrew it."
        state.pending_outputs.extend(end_request(state, able[0], LENGTH, sentence))
    if state.reservation.is_counted and any(other.status is Status.LOADING for other in queues.away):
        # All free blocks may be reserved for them.
        return
    if queues.waiting.num:
        request = queues.waiting.head()
        # Requests that hold blocks after this wait for tokens from the caller.
        fits = _clear(state, step, request, books.to_enter)
        # Alone in the pool, a group that does not fit is admitted all the same. It ends when it outgrows the pool.
        is_alone = not queues.running.num and all(other.status is Status.SWAPPED for other in queues.away)
        may_try = is_alone and not state.reservation.reserves and not state.outstanding.held_blocks()
        if (fits or may_try) and not step.admitted:
            state.admission.begin_batch(state.limits, [request])
            admit(state, step, request)
            if not step.num_rows and request.status is Status.RUNNING:
                _run(state, step, request)


def _make_room(state: State, step: Step, request: RequestState) -> bool:
    """Preempt others for the request, unless all of them are too few. Return whether at least its next token fits."""
    books, manager = state.books, state.manager
    may_give = partial(_may_give, state)
    givers = [other for other in state.victims.candidates(books, may_give) if other is not request]
    keepers = [other for other in (*state.running, *state.away) if other not in givers]
    kept = manager.pages_of_rows([row for other in keepers for row in other.live_rows])
    if books.to_go_on(request) > manager.capacity - kept:
        return False
    needed = books.to_go_on if request.status is Status.RUNNING else books.to_return
    return _clear(state, step, request, needed) or books.to_go_on(request) <= books.allowance(request)


def _may_give(state: State, other: RequestState) -> bool:
    if other not in state.books.bounded or not state.outstanding.has_todo(other):
        return True
    # After a cancel took reserved blocks back, worst cases may be missing blocks; they do not bind when nothing runs.
    return state.books.owed_to_bounded() > state.manager.device.num_available


def _clear(state: State, step: Step, request: RequestState, needed: Callable[[RequestState], int]) -> bool:
    """Preempt others until `needed(request)` blocks, counted anew each time, are available. Return whether they are."""
    books = state.books
    for victim in state.victims.candidates(books, partial(_may_give, state)):
        missing = needed(request) - books.allowance(request)
        if missing <= 0 and state.reservation.reason(books, request, 0) is None:
            break
        if victim is not request:
            preempt(state, step, victim, max(missing, 0), may_swap=False)
    return books.allowance(request) >= needed(request) and state.reservation.reason(books, request, 0) is None


def _run(state: State, step: Step, request: RequestState) -> bool:
    """Bring the request back if it is away, and place its rows. Return whether the step has any row now."""
    if request.status in (Status.PAUSED, Status.SWAPPED):
        bring_back(state, step, request)
    for row in request.live_rows:
        if not state.manager.is_placed(row):
            place_chunk(state, step, request, row)
    return step.num_rows > 0
