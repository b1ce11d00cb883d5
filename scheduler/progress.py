"""Progress where a step would compute nothing: the first request able to run gets what it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .admission import admit, bring_back
from .composition import place_chunk
from .ending import end_request
from .preemption import preempt
from .request import LENGTH, RequestState, Status
from .reservations import Books
from .state import State, Step


def force_progress(state: State, step: Step) -> None:
    """Run the first request that has work and can get room; end those that outgrew the pool."""
    books, queues = state.books, state.queues
    admitted = [request for request in (*queues.running, *queues.away) if request.status is not Status.LOADING]
    while able := sorted((r for r in admitted if _has_todo(books, r)), key=lambda request: request.order):
        # A request with its worst case reserved may stand behind one that lacks just those blocks.
        if any(_make_room(state, step, request) and _run(state, step, request) for request in able):
            return
        if any(other.status is Status.LOADING for other in queues.away):
            # Their blocks come back when the caller has loaded.
            return
        sentence = "ended with length: alone in the pool, it outgrew it."
        state.pending_outputs.extend(end_request(state, able[0], LENGTH, sentence))
    if queues.waiting.num:
        request = queues.waiting.head()
        # What then still holds blocks waits for tokens from the caller.
        fits = _clear(state, step, request, books.to_enter)
        # A group whose prompt exceeds what it shares is admitted all the same, and ends when it outgrows the pool.
        is_alone = not queues.running.num and all(other.status is Status.SWAPPED for other in queues.away)
        may_try = is_alone and not state.reservation.reserves
        if (fits or may_try) and not step.admitted:
            state.admission.begin_batch(state.limits, [request])
            admit(state, step, request)
            if not step.num_rows and request.status is Status.RUNNING:
                _run(state, step, request)


def _has_todo(books: Books, request: RequestState) -> bool:
    tables = books.manager.rows
    return any(tables.num_tokens[row] != tables.num_launched[row] for row in request.live_rows)


def _make_room(state: State, step: Step, request: RequestState) -> bool:
    """Take what the request needs, unless it cannot suffice. Return whether at least its next token fits."""
    books, manager = state.books, state.manager
    may_give = partial(_may_give, books)
    givers = [other for other in state.victims.candidates(books, may_give) if other is not request]
    keepers = [other for other in (*state.running, *state.away) if other not in givers]
    if books.to_go_on(request) > manager.num_blocks - manager.pages_of_rows(
        [row for other in keepers for row in other.live_rows]
    ):
        return False
    needed = books.to_go_on if request.status is Status.RUNNING else books.to_return
    return _clear(state, step, request, needed) or books.to_go_on(request) <= books.allowance(request)


def _may_give(books: Books, other: RequestState) -> bool:
    if other not in books.bounded or not _has_todo(books, other):
        return True
    # Reservations that a cancel took back in part do not bind when nothing else goes on.
    return books.owed_to_bounded() > books.manager.device.num_available


def _clear(state: State, step: Step, request: RequestState, needed: Callable[[RequestState], int]) -> bool:
    """Take from other victims until the `needed` blocks, which may change, are available. Return whether they are."""
    books = state.books
    for victim in state.victims.candidates(books, partial(_may_give, books)):
        missing = needed(request) - books.allowance(request)
        if missing <= 0 and state.reservation.has_place(books, request):
            break
        if victim is not request:
            preempt(state, step, victim, max(missing, 0), may_swap=False)
    return books.allowance(request) >= needed(request) and state.reservation.has_place(books, request)


def _run(state: State, step: Step, request: RequestState) -> bool:
    """Run the request with what it can compute. Return whether anything is in flight now."""
    if request.status in (Status.PAUSED, Status.SWAPPED):
        bring_back(state, step, request)
    for row in request.live_rows:
        if not state.manager.is_placed(row):
            place_chunk(state, step, request, row)
    return step.num_rows > 0
