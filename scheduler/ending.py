"""The end of a batch: its samples become tokens and ends of sequences, or a cancel takes it back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import token_array
from paged.base.growing import rising_from
from paged.errors import InvalidTokens, WrongTokens

from .batch import Batch, Left, Output, Outputs, RequestUsage, Ticket
from .composition import ones
from .drafts import UNKNOWN_DRAFT
from .preemption import drop_rows
from .request import RequestState
from .rows import Rows
from .state import State
from .status import ABORT, FINISH_REASONS, REJECTED, Status
from .stopping import finish_codes, kept_counts, kept_of

Counts = NDArray[np.int64]
_INT64 = np.dtype(np.int64)
_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
_STATUS = {ABORT: Status.ABORTED, REJECTED: Status.REJECTED}
_FINISHED = tuple((Status.FINISHED, f"has finished ({reason}).") for reason in FINISH_REASONS)


def validated_tokens(
    state: State, batch: Batch, token_ids: Any, counts: Any
) -> tuple[NDArray[np.int32], Counts | None]:
    """Return new tokens, int32 [sum], and `counts`, int64 [n], or None if usual. Raises WrongTokens."""
    ticket = batch.ticket
    try:
        tokens = token_array(token_ids) if len(token_ids) else _NO_TOKENS
    except TypeError:
        raise WrongTokens(f"batch {batch.number}: token_ids has to be a sequence; got {token_ids!r}.") from None
    except InvalidTokens as error:
        raise WrongTokens(f"batch {batch.number}: {error}") from None
    vocabulary = state.limits.vocabulary_size
    if vocabulary is not None and len(tokens) and int(tokens.max()) >= vocabulary:
        raise WrongTokens(
            f"batch {batch.number}: token id {int(tokens.max())} is outside the vocabulary of {vocabulary}."
        )
    if counts is None:
        if len(tokens) != ticket.num_samples:
            raise WrongTokens(f"batch {batch.number}: {ticket.num_samples} rows sample; got {len(tokens)} tokens.")
        return tokens, None
    rows, samples = ticket.rows, ticket.samples
    if isinstance(counts, np.ma.MaskedArray):
        raise WrongTokens(f"batch {batch.number}: counts is masked; a masked count has no value.")
    try:
        array = np.asarray(counts)
    except ValueError:
        raise WrongTokens(f"batch {batch.number}: counts has to hold {len(rows)} integers; got {counts!r}.") from None
    if array.shape != rows.shape or (array.dtype.kind not in "iu" and array.size):
        raise WrongTokens(
            f"batch {batch.number}: counts has to hold {len(rows)} integers, one a row; got {array.dtype} of shape {array.shape}."
        )
    # The usual counts are recognised by their bytes: a reduction costs more.
    usual = ones(len(rows)) if ticket.all_sample else samples.astype(np.int64)
    if array.dtype == _INT64 and array.tobytes() == usual.tobytes() and len(tokens) == ticket.num_samples:
        return tokens, None
    if array.size and not (int(array.min()) >= 0 and int(array.max()) <= len(tokens)):
        # Sums of larger counts wrap.
        raise WrongTokens(
            f"batch {batch.number}: counts have to be from 0 to the {len(tokens)} tokens that came; got {array.min()} to {array.max()}."
        )
    array = array.astype(np.int64)
    if not ticket.all_sample and array[~samples].any():
        row = int(rows[(array > 0) & ~samples][0])
        raise WrongTokens(f"batch {batch.number}: row {row} does not sample in it, and got tokens.")
    if state.outstanding.batches and (array > 1).any():
        _must_not_rest_on(state, batch, array)
    if ticket.draft_counts is not None:
        _must_be_drafts(batch, tokens, array)
    if int(array.sum()) != len(tokens):
        raise WrongTokens(f"batch {batch.number}: counts add up to {int(array.sum())}; got {len(tokens)} tokens.")
    return tokens, None if array.tobytes() == usual.tobytes() else array


def _must_be_drafts(batch: Batch, tokens: NDArray[np.int32], counts: Counts) -> None:
    """Raise WrongTokens for more accepted drafts than there were, or other ones."""
    ticket = batch.ticket
    drafted, draft_tokens = ticket.draft_counts, ticket.draft_tokens
    assert drafted is not None and draft_tokens is not None, "the batch has drafts"
    is_longer = counts > drafted + 1
    if is_longer.any() and (many := is_longer & (drafted > 0)).any():
        place = int(many.nonzero()[0][0])
        raise WrongTokens(
            f"batch {batch.number}: row {ticket.rows[place]} got {counts[place]} tokens; it had {drafted[place]} drafts, and one token comes "
            "after them."
        )
    if int(counts.sum()) != len(tokens):
        return
    # All tokens of a row with drafts, except the last, are its first drafts.
    expected = draft_tokens.take(rising_from(drafted.cumsum() - drafted, counts), mode="clip")
    is_wrong = (tokens != expected) & (expected != UNKNOWN_DRAFT)
    is_wrong[counts.cumsum()[counts > 0] - 1] = False
    if is_wrong.any() and (is_wrong := is_wrong & (drafted > 0).repeat(counts)).any():
        at = int(is_wrong.nonzero()[0][0])
        raise WrongTokens(
            f"batch {batch.number}: row {ticket.rows.repeat(counts)[at]} got token {tokens[at]} where its draft was {expected[at]}: what was "
            "accepted is what was computed."
        )


def _must_not_rest_on(state: State, batch: Batch, counts: Counts) -> None:
    """Raise WrongTokens if a row gets several tokens and a later batch counts on one."""
    for later in state.outstanding.batches:
        places = later.source_places[later.source_batches == batch.number]
        wrong = places[counts[places] > 1]
        if len(wrong):
            place = int(wrong[0])
            raise WrongTokens(
                f"batch {batch.number}: row {batch.ticket.rows[place]} got {counts[place]} tokens, and batch {later.number} rests on one."
            )


def update(state: State, batch: Batch, tokens: NDArray[np.int32], counts: Counts | None) -> Outputs:
    """End the oldest batch, which ran: confirm its tokens, append what was sampled, end sequences."""
    ticket = batch.ticket
    _account(state, batch)
    state.outstanding.release_loading(batch.number)
    if counts is None and ticket.draft_counts is not None:
        counts = ticket.samples.astype(np.int64)
    late = _sampled_elsewhere(ticket, tokens, counts) if ticket.gone else []
    rows, ids, sequences, ends, picked = ticket.rows, batch.ids, batch.sequences, ticket.ends, None
    if ticket.gone or not ticket.all_sample:
        picked = ticket.places_sampled()
        rows, ids, sequences, ends = rows[picked], ids[picked], sequences[picked], ends[picked]
    is_even = True
    if counts is None:
        if ticket.gone:
            tokens = tokens[(np.cumsum(ticket.samples) - 1)[picked]]
        totals = ends
        if ticket.flight is not None:
            totals = state.manager.end_step(ticket.flight, rows, tokens, ends)
        codes, done = finish_codes(state.columns, rows, tokens, totals)
        kept = ones(len(rows))
    else:
        tokens, kept, ends, totals, codes = _extend_unevenly(state, ticket, rows, tokens, counts, picked)
        done, is_even = codes.nonzero()[0], bool((totals == ends + 1).all())
    state.stats.output_tokens += len(tokens)
    # Each of these rows has one token to go. Identity of the array tells if any row has left or joined since.
    may_be_steady = is_even and ticket.covers_running and rows is ticket.rows and not state.outstanding.batches
    usage: dict[int, RequestUsage] = {}
    if len(done):
        goes_on = np.empty(len(rows), np.bool_)
        goes_on.fill(True)
        goes_on[done] = False
        staying = rows[goes_on]
        if may_be_steady and state.running_rows.replace(rows, staying):
            state.running_rows.settle(staying, ends[goes_on], totals[goes_on])
        else:
            state.running_rows.leave([row for row in rows[done].tolist() if _is_running(state, row)])
        for place in done.tolist():
            row = rows.item(place)
            owner, sequence = state.columns.owner[row], state.columns.sequence.item(row)
            took = _finish(state, owner, sequence, codes.item(place), has_left_rows=True)
            if took is not None:
                usage[place] = took
    elif may_be_steady:
        state.running_rows.settle(rows, ends, totals)
    others = [output for left, sampled in late for output in _deliver(state, left, sampled)] + take_pending(state)
    return Outputs(ids, sequences, tokens, kept, codes, usage, others)


def _extend_unevenly(
    state: State, ticket: Ticket, rows: Rows, tokens: NDArray[np.int32], counts: Counts, picked: Counts | None
) -> tuple[NDArray[np.int32], Counts, Counts, Counts, NDArray[np.int8]]:
    """Settle a batch with drafts or uneven tokens, and extend `rows`, its `picked` ones; `counts` are of all its rows.
    Return the tokens kept and, by row, how many are kept, its computed and known tokens, and why it ends."""
    manager, stats = state.manager, state.stats
    state.columns.advance_unevenly()
    given, first, drafted, ends = counts, counts.cumsum() - counts, ticket.draft_counts, ticket.ends
    if picked is not None:
        given, first, ends = given[picked], first[picked], ends[picked]
        drafted = None if drafted is None else drafted[picked]
    kept, codes = kept_counts(state.columns, rows, (tokens, first, given), manager.rows.num_tokens[rows])
    if int(kept.sum()) != len(tokens):
        tokens = tokens[rising_from(first, kept)]
    totals = manager.extend_by(rows, tokens, kept)
    if drafted is not None:
        assert ticket.draft_counts is not None, "some are given"
        accepted = np.minimum(np.maximum(given - 1, 0), drafted)
        stats.drafted_tokens += int(ticket.draft_counts.sum())
        stats.accepted_tokens += int(accepted.sum()) + _accepted_elsewhere(ticket, counts)
        ends = ends + accepted
        has_drafts = drafted > 0
        manager.reject(rows[has_drafts], ends[has_drafts])
    if ticket.flight is not None:
        manager.settle(ticket.flight)
    goes_on = codes == 0
    if state.outstanding.batches:
        for row in rows[(given != 1) & goes_on].tolist():
            _void_unknown(state, state.columns.owner[row], state.columns.sequence.item(row))
    if len(given) and not int(given.min()):
        state.queues.reopen()
        _hush(state, rows[(given == 0) & goes_on])
    return tokens, kept, ends, totals, codes


def _accepted_elsewhere(ticket: Ticket, counts: Counts) -> int:
    """Return the number of right drafts of sequences that gave their rows back."""
    drafted = ticket.draft_counts
    assert drafted is not None, "the batch has drafts"
    places = [place for place, left in ticket.gone.items() if not left.is_void]
    return int(np.minimum(np.maximum(counts[places] - 1, 0), drafted[places]).sum()) if places else 0


def _is_running(state: State, row: int) -> bool:
    return bool(state.columns.owner[row].status is Status.RUNNING)


def _hush(state: State, rows: Rows) -> None:
    """Mark rows that got no token: until the caller appends some, what they compute does not sample."""
    manager = state.manager
    for row in rows.tolist():
        is_out = any(batch.ticket.place_of(row) >= 0 for batch in state.outstanding.batches)
        if is_out or manager.rows.num_launched[row] < manager.rows.num_tokens[row]:
            request, sequence = state.columns.owner[row], state.columns.sequence.item(row)
            request.hush(sequence)
            state.silent.add(row)
        request = state.columns.owner[row]
        if request.status in (Status.PAUSED, Status.SWAPPED) and len(request.rows) == 1 and not is_out:
            _park(state, request)


def _park(state: State, request: RequestState) -> None:
    """Take the blocks of a preempted request that has nothing to compute until the caller appends tokens."""
    state.remember_high_water(request)
    state.queues.leave(request)
    state.books.lift_bound(request)
    drop_rows(state, request)
    request.hush(0)
    state.queues.park(request)
    state.parked_late.append(request)


def _void_unknown(state: State, request: RequestState, sequence: int) -> None:
    """Void what outstanding batches compute beyond the known tokens of a sequence: a token did not come."""
    row, num_known = request.rows[sequence], state.books.num_known(request, sequence)
    state.outstanding.void_beyond(request, sequence, num_known)
    if row >= 0:
        state.manager.give_up_from(row, num_known)


def _sampled_elsewhere(
    ticket: Ticket, tokens: NDArray[np.int32], counts: Counts | None
) -> list[tuple[Left, list[int]]]:
    """Return what the batch sampled for sequences that gave their rows back while it was out."""
    found: list[tuple[Left, list[int]]] = []
    each = ticket.samples.astype(np.int64) if counts is None else counts
    stops = np.cumsum(each)
    for place, left in sorted(ticket.gone.items()):
        if not left.is_void and ticket.samples[place]:
            found.append((left, tokens[stops[place] - each[place] : stops[place]].tolist()))
    return found


def _deliver(state: State, left: Left, sampled: list[int]) -> list[Output]:
    """Append tokens to a sequence that lost its row after they were placed, wherever it is now."""
    (request, sequence, _), manager = left, state.manager
    row, known = request.rows[sequence], request.tokens[sequence]
    if not sampled:
        # Computed again, it must not sample: it waits for tokens from the caller.
        request.hush(sequence)
        _void_unknown(state, request, sequence)
        if row >= 0:
            state.silent.add(row)
        elif request.id not in state.parked and all(
            quiet for quiet, tokens in zip(request.is_quiet, request.tokens, strict=True) if tokens is not None
        ):
            state.queues.leave(request)
            state.queues.park(request)
        return [Output(request.id, sequence, [], None, None)]
    count, code = kept_of(request, sequence, sampled, state.books.num_known(request, sequence))
    new = np.array(sampled[:count], np.int32)
    state.stats.output_tokens += count
    if row >= 0:
        manager.append_row(row, new)
        state.running_rows.unsettle()
    else:
        assert known is not None, "a sequence without a row keeps its tokens"
        request.tokens[sequence] = np.concatenate([known, new])
        request.wake(sequence)
        state.queues.unpark(request)
    usage = _finish(state, request, sequence, code) if code else None
    if not code and count != 1 and state.outstanding.batches:
        _void_unknown(state, request, sequence)
    return [Output(request.id, sequence, new.tolist(), FINISH_REASONS[code], usage)]


def cancel(state: State, batch: Batch, moved: bool) -> None:
    """Take back what the latest batch, which did not run, put in flight. Carry its moves over unless they ran."""
    manager, ticket = state.manager, batch.ticket
    state.stats.cancelled_tokens += batch.num_scheduled_tokens
    rolled_back = {} if ticket.flight is None else manager.take_back(ticket.flight)
    manager.growth.put_back_changes(batch.table_rows, batch.table_columns, batch.table_blocks)
    state.queues.reopen()
    state.running_rows.unsettle()
    for row, lost in rolled_back.items():
        owner = state.columns.owner[row]
        owner.hit_tokens -= lost
        if owner.num_asked:
            _ask_again(state, owner)
    state.carried.keep(batch, moved)
    state.outstanding.release_loading(batch.number)


def take_pending(state: State) -> list[Output]:
    """Remove and return the outputs of requests that ended outside a batch."""
    pending, state.pending_outputs = state.pending_outputs, []
    return pending


def end_request(state: State, request: RequestState, code: int, sentence: str) -> list[Output]:
    """End the request in any state. Return the last output of each live sequence, the usage with the last one."""
    live = [sequence for sequence in range(len(request.rows)) if state.delivers(request, sequence)]
    usage = _end(state, request, (_STATUS.get(code, Status.FINISHED), sentence))
    return [Output(request.id, i, [], FINISH_REASONS[code], usage if i == live[-1] else None) for i in live]


def finish(state: State, request: RequestState, sequence: int, code: int) -> Output:
    """End a live sequence in any state. Return its last output, with the usage if its request ends with it."""
    return Output(request.id, sequence, [], FINISH_REASONS[code], _finish(state, request, sequence, code))


def _finish(
    state: State, request: RequestState, sequence: int, code: int, *, has_left_rows: bool = False
) -> RequestUsage | None:
    """End a live sequence, and its request with the last. Return the usage if the request has ended."""
    if request.num_live == 1:
        return _end(state, request, _FINISHED[code], has_finished=True, has_left_rows=has_left_rows)
    state.queues.reopen()
    row = request.rows[sequence]
    if row >= 0 and not has_left_rows and request.status is Status.RUNNING:
        state.running_rows.leave([row])
    _release(state, request, sequence, has_finished=True)
    if request in state.to_reject:
        longest = state.books.max_total_of(len(request.rows))
        if all(state.books.num_known(request, other) < longest for other in range(len(request.rows))):
            state.to_reject.remove(request)
    return None


def _end(
    state: State,
    request: RequestState,
    ending: tuple[Status, str],
    *,
    has_finished: bool = False,
    has_left_rows: bool = False,
) -> RequestUsage:
    """End the request and release what it holds. Return its usage."""
    state.queues.reopen()
    state.queues.leave(request, has_left_rows=has_left_rows)
    state.outstanding.hold_loading(request)
    for sequence, row in enumerate(request.rows):
        if row >= 0 or request.tokens[sequence] is not None:
            _release(state, request, sequence, has_finished=has_finished)
    if request.is_bounded:
        state.books.lift_bound(request)
    if state.to_reject and request in state.to_reject:
        state.to_reject.remove(request)
    state.end(request, ending)
    return state.usage_of(request)


def _release(state: State, request: RequestState, sequence: int, *, has_finished: bool) -> None:
    """Release what a live sequence holds. If it `has_finished`, note its length and retain its content."""
    row = request.rows[sequence]
    num_output = state.books.num_known(request, sequence) - request.prompt_len - request.appended[sequence]
    if has_finished:
        state.lengths.note(num_output)
        if state.foresight is not None:
            state.foresight.finished(pause=request.longest_pause)
        retention = request.request.retention
        if row >= 0 and retention is not None:
            state.retain_content(retention, row)
    request.lose(num_output)
    if row >= 0:
        state.release_row(request, sequence)
        return
    request.tokens[sequence] = None
    if state.outstanding.batches:
        state.outstanding.leave(request, sequence, has_ended=True)


def _account(state: State, batch: Batch) -> None:
    stats, ticket = state.stats, batch.ticket
    if len(ticket.rows):
        stats.steps += 1
    stats.computed_tokens += len(batch.token_ids)
    for place, left in ticket.gone.items():
        if left.is_void:
            stats.voided_tokens += int(batch.num_tokens[place])
    for place, high in ticket.computed_before.items():
        gone = ticket.gone.get(place)
        if gone is None or not gone.is_void:
            owner = state.columns.owner[int(ticket.rows[place])] if gone is None else gone.request
            _count_recomputed(state, batch, place, high, owner)
    for row, high in list(state.recovering.items()):
        place = ticket.place_of(row)
        if place >= 0 and place not in ticket.computed_before:
            _count_recomputed(state, batch, place, high, state.columns.owner[row])
            if ticket.ends[place] >= high:
                del state.recovering[row]


def _count_recomputed(state: State, batch: Batch, place: int, high: int, request: RequestState) -> None:
    """Count tokens of the row at this place below `high`: they had been computed before."""
    ticket = batch.ticket
    stop = int(ticket.ends[place])
    num_drafts = 0 if ticket.draft_counts is None else int(ticket.draft_counts[place])
    again = max(0, min(high, stop) - (stop + num_drafts - int(batch.num_tokens[place])))
    state.stats.recomputed_tokens += again
    request.recomputed_tokens += again


def _ask_again(state: State, request: RequestState) -> None:
    """Let a loading request that lost blocks wait again; it asks for its loads when it is admitted again."""
    state.queues.leave(request)
    drop_rows(state, request)
    request.ask_again()
    state.queues.wait(request)
