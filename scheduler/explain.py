"""Why a request is not running, in words and numbers that an operator can act on. Reads everything, changes nothing."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import msgspec
import numpy as np

from paged.base.words import counted
from paged.errors import UnknownRequest

from .admission import watermark
from .request import RequestState
from .state import State
from .status import Status

_SAMPLES_ARE_OUT = "it gave its blocks back while a batch samples for it, and comes in again when that has ended."


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `Scheduler.explain` found.

    reason is a sentence; blocks_needed what the request lacks to go on (blocks), blocks_free what could be drawn for it, and holders
    the other requests that hold blocks, most first, as (id, blocks). Each block counts once: one that several share for the first of
    them in order, which gives it up last, and none that the request itself holds. str() is the whole story.
    """

    id: str
    status: str
    reason: str
    blocks_needed: int = 0
    blocks_free: int = 0
    holders: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        text = f'request "{self.id}" is {self.status}: {self.reason}'
        if self.blocks_needed > self.blocks_free and self.holders:
            held = ", ".join(f'"{name}" {blocks}' for name, blocks in self.holders[:3])
            text += f" Blocks are held by {held}{' and others' if len(self.holders) > 3 else ''}."
        return text


class _Found(NamedTuple):
    """A sentence, blocks that the request lacks to go on, and blocks that could be drawn for it."""

    reason: str
    needed: int
    free: int


def explain(state: State, request_id: str) -> Explanation:
    """Why the request is where it is. Raises UnknownRequest."""
    request = state.requests.get(request_id)
    if request is None:
        status, sentence = _ended(state, request_id)
        return Explanation(id=request_id, status=status.value, reason=sentence)
    found = _found(state, request)
    return Explanation(
        id=request.id,
        status=request.status.value,
        reason=found.reason,
        blocks_needed=found.needed,
        blocks_free=found.free,
        holders=_holders(state, request),
    )


def reason(state: State, request_id: str) -> str:
    """The sentence of `explain` by itself, which costs no look at other requests' blocks. Raises UnknownRequest."""
    request = state.requests.get(request_id)
    return _ended(state, request_id)[1] if request is None else _found(state, request).reason


def _ended(state: State, request_id: str) -> tuple[Status, str]:
    if request_id not in state.ended:
        raise UnknownRequest(request_id)
    return state.ended[request_id]


def _found(state: State, request: RequestState) -> _Found:
    if request.status is Status.WAITING:
        return _waiting(state, request)
    if request.status is Status.LOADING:
        reason = "it waits for tokens whose KV exists elsewhere; call loaded() when they have arrived."
        return _Found(reason, 0, free_blocks(state))
    if request.status in (Status.PAUSED, Status.SWAPPED):
        return _away(state, request)
    return _running(state, request)


def _holders(state: State, request: RequestState) -> tuple[tuple[str, int], ...]:
    """The other requests that hold blocks, and how many, each block counted once; most first."""
    is_counted = np.zeros(state.manager.num_blocks, np.bool_)
    for row in request.live_rows:
        is_counted[state.manager.rows.table(row)] = True
    held: dict[str, int] = {}
    for other in sorted(state.requests.values(), key=lambda other: other.order):
        before = np.count_nonzero(is_counted)
        for row in other.live_rows:
            is_counted[state.manager.rows.table(row)] = True
        blocks = int(np.count_nonzero(is_counted) - before)
        if blocks and other is not request:
            held[other.id] = blocks
    return tuple(sorted(held.items(), key=lambda item: (-item[1], item[0])))


def free_blocks(state: State) -> int:
    """Blocks that a newcomer could draw now: available ones that are not owed to admitted requests."""
    return max(0, state.manager.device.num_available - state.books.owed())


def _waiting(state: State, request: RequestState) -> _Found:
    needed, free = state.books.to_enter(request), free_blocks(state)
    known = next((tokens for tokens in request.tokens if tokens is not None), None)
    if known is not None:
        is_promised = state.reservation.is_counted or state.books.is_due(request)
        needed -= state.manager.content.held_prefix(known, request.root, confirmed=is_promised)
    kept = watermark(state)
    returning = [other for other in state.away if other.status is not Status.LOADING]
    ahead = list(takewhile(lambda other: other is not request, state.waiting))
    was = (
        f" It was preempted {counted(request.preemptions, 'time')} and will compute {counted(_lost(request), 'token')} again."
        if request.preemptions
        else ""
    )
    if state.books.is_due(request):
        was += " It re-enters only with its worst case reserved."
    if request.id in state.parked:
        reason = "everything that it knows was computed, and it gave its blocks to others; it waits for append()."
    elif state.outstanding.keeps_out(request):
        reason = _SAMPLES_ARE_OUT
    elif ahead:
        reason = f'it is behind {counted(len(ahead), "request")} in the queue, the first of which is "{ahead[0].id}".'
    elif returning:
        reason = f'"{returning[0].id}" was preempted and returns first.'
    elif needed + kept > free:
        reason = f"it needs {counted(needed, 'block')}; {free} are free and not promised to others, of which {kept} are kept as watermark."
    elif (no_place := state.reservation.reason(state.books, request, free)) is not None:
        reason = no_place
    elif state.foresight is not None and not state.foresight.fits(request):
        most, slots = state.foresight.peak_with(request), state.foresight.capacity_with(request)
        reason = (
            f"with it, those who are in would need {most:,} tokens at their fullest moment, as long as outputs are taken to become, and there "
            f"is room for {slots:,}."
        )
    elif len(state.running_rows.array(state.running)) + request.num_live > state.limits.max_sequences:
        reason = f"all {state.limits.max_sequences} seats are taken (max_sequences)."
    else:
        later = state.admission.reason(state) or state.composition.reason(state)
        reason = later or "it can be admitted in the next step."
    return _Found(reason + was, needed + kept, free)


def _lost(request: RequestState) -> int:
    return sum(request.high_water)


def _away(state: State, request: RequestState) -> _Found:
    manager = state.manager
    needed, free = state.books.to_return(request), free_blocks(state)
    kept = watermark(state)
    on_device = sum(int(manager.rows.num_blocks[row]) for row in request.live_rows)
    on_host = sum(manager.tiers.num_on_host(row) for row in request.live_rows)
    reason = (
        f"it was preempted {counted(request.preemptions, 'time')}, keeps {counted(on_device, 'block')} and has {on_host} on the host; it needs "
        f"{counted(needed, 'block')} to go on; {free} are free and not promised to others, of which {kept} are kept as watermark."
    )
    if state.outstanding.keeps_out(request):
        reason = _SAMPLES_ARE_OUT
    return _Found(reason, needed + kept, free)


def _running(state: State, request: RequestState) -> _Found:
    manager = state.manager
    if request.follows is not None:
        leader = request.follows
        reason = (
            f'it waits for "{leader}", which is computing the same prompt; it shares those blocks when they are done.'
        )
        return _Found(reason, 0, free_blocks(state))
    if state.outstanding.computes(request):
        return _Found("it is in a batch that has not ended.", 0, free_blocks(state))
    if state.outstanding.is_idle(request):
        return _Found("everything that it knows is computed; it waits for append().", 0, free_blocks(state))
    needed = state.books.debt_of(request)
    # What is owed to it is not kept from it.
    free = max(0, manager.device.num_available - state.books.owed() + needed)
    if needed > free:
        reason = (
            f"it needs {counted(needed, 'block')} for what it knows or has reserved, and {free} are free and not promised to others; it gets what those "
            "hold when a batch that has not ended gives blocks back, or when a request can be preempted."
        )
        return _Found(reason, needed, free)
    return _Found("it gets tokens in the next step, as the budget allows.", needed, free)
