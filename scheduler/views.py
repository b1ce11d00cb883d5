"""Read-only views of requests: figures, why one is not running, and the arrays from which a forecast begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import msgspec
import numpy as np

from paged.base.arguments import Tokens
from paged.base.growing import ones
from paged.base.words import counted
from paged.block_manager import HitEnd, Memory

from .cached_queue import cached_tokens
from .foresight import outputs_left
from .request import RequestState, Status
from .rows import Counts, Rows
from .state import Limits, State

_WHY = {
    "pending": "what comes next was still being computed",
    "evicted": "{} had more, which was evicted",
    "not kept": "{} kept nothing after that",
    "not loaded": "the host has more, but copying it costs more than computing it, or there is no room for it",
}
_LOOKED_UP = 64
"""How many waiting requests an outlook looks up in the cache: a long prompt takes 50 µs."""
_SAMPLES_ARE_OUT = "it gave its blocks back while a batch samples for it, and can return when that batch has ended."


def _first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if names[3:] else ''}"


class RequestView(msgspec.Struct, frozen=True):
    """A live request: tokens and blocks of all its sequences together, but max_tokens of each. device_blocks counts
    block table entries, so a shared block several times. hit_tokens: of its first admission."""

    id: str
    status: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    device_blocks: int
    host_blocks: int
    hit_tokens: int
    preemptions: int


class LayersView(msgspec.Struct, frozen=True, kw_only=True):
    """What a request holds of layers of several kinds. Lengths are in tokens, of its first live sequence.

    pages     (group, pages) that it holds, of all sequences
    hit       where the lookup of its prompt ended, or, without a row, would end now; None: nothing was found
    restarts  the least and the most tokens to which its row can be cut, 0 aside, and any number between; (0, 0): no row
    again     tokens that it would find in the cache now if it gave all its blocks back
    says      all this in sentences
    """

    pages: tuple[tuple[str, int], ...] = ()
    hit: HitEnd | None = None
    restarts: tuple[int, int] = (0, 0)
    again: int = 0
    says: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `Scheduler.explain` found; str() says it all. blocks_needed: what the request lacks to go on. blocks_free:
    what could be drawn for it. holders: (id, blocks) of other requests, most first. A shared block counts once, for its
    first holder in order, which gives it up last; and not at all if the request itself holds it."""

    id: str
    status: str
    reason: str
    blocks_needed: int = 0
    blocks_free: int = 0
    holders: tuple[tuple[str, int], ...] = ()
    layers: LayersView | None = None

    def __str__(self) -> str:
        text = f'request "{self.id}" is {self.status}: {self.reason}'
        if self.layers is not None:
            text += self.layers.says
        if self.blocks_needed > self.blocks_free and self.holders:
            held = [f'"{name}" {blocks}' for name, blocks in self.holders]
            text += f" Blocks are held by {_first_of(held)}."
        return text


class PrefixExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt are cached in full blocks: the first ones on the device, the next ones on the host.
    `says`: why no more are; str() returns it."""

    num_tokens: int
    device_tokens: int
    host_tokens: int
    says: str

    def __str__(self) -> str:
        return self.says


def explain_prefix(state: State, tokens: Tokens, root: bytes) -> PrefixExplanation:
    manager, size = state.manager, state.manager.block_size
    here, there, gone, elsewhere = manager.content.why_missing(tokens, root)
    num, end = (here + there) * size, len(tokens) - len(tokens) % size
    says = f"{here * size:,} of {counted(len(tokens), 'token')} are cached on the device"
    says += f", and {there * size:,} more on the host" if there else ""
    if num == end:
        says += "." if num else "; they do not fill a block."
    elif gone is not None:
        place, blocks, step = gone
        when, admitted = state.admissions.get(step, (None, ()))
        says += f"; the next {counted(blocks, 'block')} left the {('device', 'host')[place]} in step {step}"
        says += "" if when is None else f" (time {when:g})"
        says += f", which admitted {_first_of(admitted)}." if admitted else "."
    else:
        says += "; what follows was never computed here in full blocks, or its eviction is not remembered."
    if elsewhere and not num:
        says += " Another salt, adapter or extra_key has its first block."
    return PrefixExplanation(num_tokens=len(tokens), device_tokens=here * size, host_tokens=there * size, says=says)


def view_of(state: State, request: RequestState) -> RequestView:
    num_output = request.num_output + sum(state.books.num_output(request, i) for i in request.live_sequences)
    tokens = request.prompt_len, num_output, request.request.max_tokens
    blocks, took = _blocks_of(state.manager, request), (request.hit_tokens, request.preemptions)
    return RequestView(request.id, request.status.value, *tokens, *blocks, *took)


def _blocks_of(manager: Memory, request: RequestState) -> tuple[int, int]:
    """Return the entries of the request's block tables, and its blocks on the host; pages if a block is no page."""
    rows, is_plain = request.live_rows, manager.layout.is_plain
    held = sum(manager.rows.num_blocks.item(row) for row in rows) if is_plain else manager.pages_of_rows(rows)
    return held, sum(map(manager.tiers.pages_on_host, rows))


def explain(state: State, request_id: str, request: RequestState | None, *, with_holders: bool) -> Explanation:
    """Carry out `Scheduler.explain`. `request`: None if it has ended."""
    if request is None:
        status, sentence = state.ended[request_id]
        return Explanation(id=request_id, status=status.value, reason=sentence)
    sentence, needed, free = _found(state, request)
    return Explanation(
        id=request.id,
        status=request.status.value,
        reason=sentence,
        blocks_needed=needed,
        blocks_free=free,
        holders=_holders(state, request) if with_holders else (),
        layers=_layers(state.manager, request) if with_holders and state.manager.layout.sides else None,
    )


def _layers(manager: Memory, request: RequestState) -> LayersView:
    rows, restarts, again = request.live_rows, (0, 0), 0
    pages = tuple(zip([group.name for group in manager.layout.groups], manager.pages_by_group(rows), strict=True))
    tokens = manager.rows.tokens[rows[0], : manager.rows.num_tokens[rows[0]]] if rows else request.first_tokens
    hit, says = None, ""
    if manager.prefix_caching and request.request.reads_cache:
        now = manager.content.hit_end(tokens, request.root)
        hit, again = manager.sides.end_of(rows[0]) if rows else now, now.num_tokens
        says = f" {'Its hit ended' if rows else 'It would begin'} {_where(manager, hit)}."
    if rows:
        restarts = manager.growth.restarts(rows[0])
        lengths = " to ".join(f"{length:,}" for length in sorted(set(restarts)))
        held = ", ".join(f"{counted(num, 'page')} of {name}" for name, num in pages)
        says += f" It holds {held}. It can stand at {lengths} tokens, and begin again at {again:,} with what is cached."
    return LayersView(pages=pages, hit=hit, restarts=restarts, again=again, says=says)


def _where(manager: Memory, hit: HitEnd | None) -> str:
    """Return the length of a hit in words, and what ended it."""
    if hit is None or not hit.found:
        return "at 0 tokens: nothing of its prompt was cached"
    at, sides = f"at {counted(hit.num_tokens, 'token')}", manager.layout.sides
    at += f" ({hit.from_host:,} of them from the host)" if hit.from_host else ""
    if hit.why not in _WHY:
        return f"{at}, {'all that can be found of its prompt' if hit.why == 'whole' else 'where the cached part of its prompt ends'}"
    allowed = ", ".join(f"{side.name} allow {length:,}" for side, length in zip(sides, hit.alone, strict=True))
    why = _WHY[hit.why].format(sides[hit.limit].name)
    return f"{at}: of {counted(hit.found, 'cached token')} {allowed}; {why}"


def _holders(state: State, request: RequestState) -> tuple[tuple[str, int], ...]:
    """Return (id, blocks) of other requests with blocks, most first, a block once; of several groups, (id, pages)."""
    manager, held = state.manager, dict[str, int]()
    is_counted = np.zeros(manager.blocks.num_pages, np.bool_)
    for other in (request, *sorted(state.requests.values(), key=lambda other: other.order)):
        before = np.count_nonzero(is_counted)
        for row in other.live_rows:
            is_counted[manager.rows.table(row)] = True
        blocks = int(np.count_nonzero(is_counted) - before)
        if blocks and other is not request:
            held[other.id] = blocks if manager.layout.is_plain else manager.pages_of_rows(other.live_rows)
    return tuple(sorted(held.items(), key=lambda item: (-item[1], item[0])))


def _found(state: State, request: RequestState) -> tuple[str, int, int]:
    """Return a sentence, the blocks that the request lacks to go on, and those that could be drawn for it."""
    books, outstanding, kept = state.books, state.outstanding, state.books.watermark()
    free, needed = state.manager.device.num_available - books.owed(), 0
    if request.status in (Status.WAITING, Status.PAUSED, Status.SWAPPED):
        free -= books.yet_to_pin(request)
    if request.status is Status.WAITING:
        needed = books.to_enter(request) - books.to_share(request) + kept
        sentence = _why_it_waits(state, request, needed, max(0, free))
    elif request.status is Status.LOADING:
        sentence = "it waits for tokens whose KV exists elsewhere; call loaded() when they have arrived."
    elif request.status in (Status.PAUSED, Status.SWAPPED):
        needed, (on_device, on_host) = books.to_return(request) + kept, _blocks_of(state.manager, request)
        times, keeps = counted(request.preemptions, "time"), counted(on_device, "block")
        has = f"it was preempted {times}, keeps {keeps} and has {on_host} on the host"
        sentence = f"{has}; it needs {counted(needed - kept, 'block')} to go on; {_free(free, kept)}"
        if outstanding.keeps_out(request):
            sentence = _SAMPLES_ARE_OUT
    elif request.follows is not None:
        sentence = f'it waits for "{request.follows}", which is computing the same prompt; it shares those blocks when they are done.'
    elif outstanding.computes(request):
        sentence = "it is in a batch that has not ended."
    elif outstanding.is_idle(request):
        sentence = "all its tokens are computed; it waits for append()."
    else:
        needed = books.owed_to(request.live_rows)
        free += needed
        sentence = "it gets tokens in the next step, as the budget allows."
        if needed > max(0, free):
            sentence = (
                f"it needs {counted(needed, 'block')} for its tokens or its reservation; {_free(free, 0)} It gets more "
                "when a batch ends and gives blocks back, or when a request can be preempted."
            )
    return sentence, needed, max(0, free)


def _free(free: int, kept: int) -> str:
    watermark = f", of which {kept} are kept as watermark" if kept else ""
    return f"{max(0, free)} are free and not promised to others{watermark}."


def _why_it_waits(state: State, request: RequestState, needed: int, free: int) -> str:
    """Return the sentence for a waiting request; `needed` includes the watermark."""
    books, queues, foresight = state.books, state.queues, state.foresight
    kept, limit = books.watermark(), state.limits.max_sequences
    returning = next((other for other in queues.away if other.status is not Status.LOADING), None)
    num_ahead = sum(1 for _ in takewhile(lambda other: other is not request, queues.waiting))
    if foresight is not None:
        foresight.forget()
    if request.id in queues.idle:
        sentence = "all its tokens were computed, and it gave its blocks to others; it waits for append()."
    elif state.outstanding.keeps_out(request):
        sentence = _SAMPLES_ARE_OUT
    elif num_ahead:
        sentence = f'it is behind {counted(num_ahead, "request")} in the queue, the first of which is "{queues.waiting.head().id}".'
    elif returning is not None:
        sentence = f'"{returning.id}" was preempted and returns first.'
    elif needed > free:
        sentence = f"it needs {counted(needed - kept, 'block')}; {_free(free, kept)}"
    elif (no_place := state.reservation.reason(books, request, free)) is not None:
        sentence = no_place
    elif foresight is not None and not foresight.fits(request):
        sentence = (
            f"with it, all requests in memory would need {foresight.peak_with(request):,} tokens at their peak, by "
            f"guesses of their outputs; there is room for {foresight.capacity_with(request):,}."
        )
    elif state.running.num_rows + request.num_live > limit:
        sentence = f"all {limit} seats are taken (max_sequences)."
    else:
        sentence = state.composition.reason(queues) or "it can be admitted in the next step."
    if request.preemptions:
        times, lost = counted(request.preemptions, "time"), counted(sum(request.high_water), "token")
        sentence += f" It was preempted {times} and will compute {lost} again."
    if books.is_due(request):
        sentence += " It re-enters only with its worst case reserved."
    return sentence


class Outlook(msgspec.Struct, frozen=True):
    """What a forecast begins with. Arrays, int64 [n] each, have running sequences, then suspended ones, which return
    first, then waiting requests, in order.

    num_sequences        of each waiting request; 1 for the others
    held                 tokens for which each has slots, or takes them when it enters
    todo                 tokens to compute before the next output; 1 for a decode. Cached tokens of waiting requests are
                         left out: those of the first 64, and the same share of the others
    left                 outputs to come of each sequence: by `expected_tokens`, else by the mean of longer ones that
                         ended, else half of what is left of max_tokens
    num_running, num_suspended  sequences of each kind
    tenants              of waiting requests alone, "" for none
    mean_output          outputs of a new request; None: none has ended
    max_total            most tokens of a sequence, prompt and outputs
    slots, spare         tokens that the pool holds for all of these, and how many of them admission leaves free
    block_size           tokens of a block
    limits               the scheduler's, as of tokens a step, and of sequences that run at a time
    joins                requests may join those that run; if not, they enter when nothing runs, whatever the budget is
    chunked              a prompt may be split over steps
    reserves             slots for all outputs are taken when a request enters
    looks_ahead          a request enters only if the pool holds all at their peak
    """

    num_sequences: Counts
    held: Counts
    todo: Counts
    left: Counts
    num_running: int
    num_suspended: int
    tenants: tuple[str, ...]
    mean_output: int | None
    max_total: int
    slots: int
    spare: int
    block_size: int
    limits: Limits
    joins: bool
    chunked: bool
    reserves: bool
    looks_ahead: bool


def outlook(state: State) -> Outlook:
    manager, layout, size = state.manager, state.manager.layout, state.manager.block_size
    rows, waiting, full = state.books.rows_in(), list(state.waiting), max(layout.full_pages, 1)
    num_rows, num_running = len(rows), state.running.num_rows
    num_sequences, known, before, most, expected, todo, held = _columns(state, rows, waiting)
    mean = state.lengths.mean_remaining(np.append(known - before, 0), (known - before)[:num_running])
    guessed = np.where(np.isnan(mean[:-1]), (most - known) // 2, np.rint(mean[:-1])).astype(np.int64)
    # Samples of outstanding batches, of which a row then has no token to compute, count as outputs.
    left = np.maximum(1, outputs_left(guessed, expected, known, most) + np.minimum(0, todo - 1))
    looked_up = np.array([cached_tokens(manager, request) for request in waiting[:_LOOKED_UP]], np.int64)
    cached = todo[num_rows:] * (looked_up.sum() / max(1, known[num_rows:][:_LOOKED_UP].sum()))
    cached[:_LOOKED_UP] = looked_up
    todo[num_rows:] -= cached.astype(np.int64)
    slots = (manager.device.num_available + int(manager.rows.num_blocks[rows].sum())) * size
    if not layout.is_plain:
        # What sides hold in the end counts as held from the start, in slots of all pages.
        held += layout.side_slots(known + left) * num_sequences
        slots = manager.capacity * size // full
    return Outlook(
        num_sequences=num_sequences,
        held=held,
        todo=np.maximum(1, todo),
        left=left,
        num_running=num_running,
        num_suspended=num_rows - num_running,
        tenants=tuple(request.request.tenant or "" for request in waiting),
        mean_output=None if math.isnan(mean[-1]) else round(mean[-1]),
        max_total=state.books.max_total,
        slots=slots,
        spare=state.books.watermark_blocks * size // full,
        block_size=size,
        limits=state.limits,
        joins=state.admission.joins,
        chunked=state.admission.chunked,
        reserves=state.reservation.reserves,
        looks_ahead=state.foresight is not None,
    )


def _columns(state: State, rows: Rows, waiting: list[RequestState]) -> Counts:
    """Return int64 [7, n], of admitted rows and then of waiting requests: sequences; of the first live one, its known
    tokens, those that are no outputs, its full length, expected tokens; tokens to compute; tokens with slots."""
    manager, columns, books, reserves = state.manager, state.columns, state.books, state.reservation.reserves
    tables, size, full = manager.rows, manager.block_size, max(manager.layout.full_pages, 1)
    known = tables.num_tokens[rows]
    totals = columns.prompt_total[rows], columns.max_total[rows], columns.expected_total[rows]
    held = np.maximum(books.kept(rows), tables.num_blocks[rows] * size) if reserves else known
    of_rows = np.array([ones(len(rows)), known, *totals, known - tables.num_launched[rows], held])
    of_waiting = []
    for request in waiting:
        sequence, num_known = request.live_sequences[0], len(request.first_tokens)
        before = request.prompt_len + request.appended[sequence]
        expected = before + (request.request.expected_tokens or 0)
        # With prefix caching, a group computes its prompt once.
        todo = num_known * (1 if manager.prefix_caching else request.num_live)
        slots = books.to_enter(request) * size // full if reserves else todo
        of_waiting.append((request.num_live, num_known, before, request.max_total[sequence], expected, todo, slots))
    return np.hstack([of_rows, np.array(of_waiting, np.int64).reshape(-1, 7).T])
