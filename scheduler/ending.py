"""The end of a batch: an update appends tokens and ends sequences, a cancel takes the batch back."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import Tokens, int64_array, tokens_below
from paged.base.growing import ones, rising_from
from paged.block_manager import Node
from paged.errors import InvalidTokens, WrongTokens

from .batch import Batch, Left, Output, Outputs, Ticket
from .drafts import UNKNOWN_DRAFT
from .preemption import drop_rows
from .request import ABORT, FINISH_REASONS, REJECTED, RequestState, RequestUsage, Status
from .rows import Counts, RowColumns, Rows
from .state import State

_INT64 = np.dtype(np.int64)
_STATUS = {ABORT: Status.ABORTED, REJECTED: Status.REJECTED}


def checked(
    batch: Batch, token_ids: Any, counts: Any, *, out: Collection[Batch], vocabulary_size: int | None
) -> tuple[Tokens, Counts | None]:
    """Return the tokens that the caller gives for all rows of a batch, int32 [m], and how many each row gets, int64 [n]
    (None: one for each row that samples). `out`: the outstanding batches. Raises WrongTokens."""
    try:
        tokens = tokens_below(token_ids, vocabulary_size)
    except InvalidTokens as error:
        raise _wrong(batch, str(error)) from None
    ticket, num = batch.ticket, len(tokens)
    rows, samples = ticket.rows, ticket.samples
    if counts is None:
        if num != ticket.num_samples:
            raise _wrong(batch, f"{ticket.num_samples} rows sample; got {num} tokens.")
        return tokens, None
    array = counts if type(counts) is np.ndarray and counts.dtype == _INT64 else int64_array(counts)
    if array is None or array.shape != rows.shape:
        raise _wrong(batch, f"counts has to hold an integer for each of {len(rows)} rows, its tokens; got {counts!r}.")
    # Most counts are the usual ones. Comparing bytes costs less than a reduction.
    usual = ones(len(rows)) if ticket.all_sample else samples.astype(np.int64)
    if array.tobytes() == usual.tobytes() and num == ticket.num_samples:
        return tokens, None
    if array.size and not (int(array.min()) >= 0 and int(array.max()) <= num):
        # The sum of larger counts could wrap.
        found = f"got {array.min()} to {array.max()}"
        raise _wrong(batch, f"counts have to be from 0 to the {num} tokens that came; {found}.")
    if not ticket.all_sample and array[~samples].any():
        row = int(rows[(array > 0) & ~samples][0])
        raise _wrong(batch, f"row {row} does not sample in it, and got tokens.")
    for other in out:
        places = other.source_places[other.source_batches == batch.number]
        if len(rests := places[array[places] > 1]):
            got = f"row {rows[rests[0]]} got {array[rests[0]]} tokens"
            raise _wrong(batch, f"{got}, and batch {other.number} rests on one.")
    if int(array.sum()) != num:
        raise _wrong(batch, f"counts add up to {int(array.sum())}; got {num} tokens.")
    if ticket.draft_counts is not None:
        _must_be_drafts(batch, tokens, array)
    # It may be the caller's.
    return tokens, array.copy()


def _must_be_drafts(batch: Batch, tokens: Tokens, counts: Counts) -> None:
    """Raise WrongTokens if a row accepts more drafts than it had, or tokens that were not its drafts."""
    ticket = batch.ticket
    drafted, draft_tokens = ticket.draft_counts, ticket.draft_tokens
    assert drafted is not None and draft_tokens is not None, "the batch has drafts"
    many = (drafted > 0) & (counts > drafted + 1)
    if many.any():
        place = int(many.argmax())
        got = f"row {ticket.rows[place]} got {counts[place]} tokens"
        raise _wrong(batch, f"{got}; it had {drafted[place]} drafts, and one token comes after them.")
    # All tokens of a row with drafts, except the last, are its first drafts.
    expected = draft_tokens.take(rising_from(drafted.cumsum() - drafted, counts), mode="clip")
    is_wrong = (tokens != expected) & (expected != UNKNOWN_DRAFT)
    is_wrong[counts.cumsum()[counts > 0] - 1] = False
    if is_wrong.any() and (is_wrong := is_wrong & (drafted > 0).repeat(counts)).any():
        at = int(is_wrong.argmax())
        got = f"row {ticket.rows.repeat(counts)[at]} got token {tokens[at]} where its draft was {expected[at]}"
        raise _wrong(batch, f"{got}: what was accepted is what was computed.")


def _wrong(batch: Batch, what: str) -> WrongTokens:
    return WrongTokens(f"batch {batch.number}: {what}")


def update(state: State, batch: Batch, tokens: Tokens, counts: Counts | None) -> Outputs:
    """End the oldest batch, which ran: confirm its tokens, append what was sampled, end sequences."""
    ticket = batch.ticket
    if ticket.gone or ticket.recomputed:
        state.outstanding.count_waste(batch, state.stats)
    state.outstanding.let_go(batch.number)
    if counts is None and ticket.draft_counts is not None:
        counts = ticket.samples.astype(np.int64)
    late = _sampled_elsewhere(ticket, tokens, counts) if ticket.gone else []
    # Places of the rows that sample and still serve their sequences; None: all do.
    picked = ticket.places_sampled() if ticket.gone or not ticket.all_sample else None
    rows, ids, sequences = ticket.rows, batch.ids, batch.sequences
    if picked is not None:
        rows, ids, sequences = rows[picked], ids[picked], sequences[picked]
    if counts is None:
        tokens, kept, ends, totals, codes = _extend_evenly(state, ticket, rows, tokens, picked)
    else:
        tokens, kept, ends, totals, codes = _extend_unevenly(state, ticket, rows, tokens, counts, picked)
    state.stats.count_batches(int(len(ticket.rows) > 0), len(batch.token_ids), len(tokens))
    # Whether each running row that goes on has one token to go.
    is_steady = picked is None and ticket.version == state.running.version and not state.outstanding.batches
    is_steady = is_steady and (counts is None or bool((totals == ends + 1).all()))
    usage: dict[int, RequestUsage] = {}
    done = codes.nonzero()[0]
    for place in done.tolist():
        row, code = rows.item(place), codes.item(place)
        request, sequence = state.columns.owner[row], state.columns.sequence.item(row)
        if (took := end_sequences(state, request, [sequence], code)) is not None:
            usage[place] = took
    if is_steady:
        state.running.settle(np.logical_not(codes).nonzero()[0] if len(done) else None, ends, totals)
    others = [_deliver(state, left, sampled) for left, sampled in late] + state.pending_outputs
    state.pending_outputs.clear()
    return Outputs(ids, sequences, tokens, kept, codes, usage, others)


def _extend_evenly(
    state: State, ticket: Ticket, rows: Rows, tokens: Tokens, picked: Counts | None
) -> tuple[Tokens, Counts, Counts, Counts, NDArray[np.int8]]:
    """Settle a batch in which each row that samples got one token, and append them. As `_extend_unevenly`."""
    ends = ticket.ends if picked is None else ticket.ends[picked]
    if ticket.gone:
        tokens = tokens[(np.cumsum(ticket.samples) - 1)[picked]]
    totals = ends
    if ticket.flight is not None:
        state.manager.settle(ticket.flight)
        totals = state.manager.extend(rows, tokens, ends)
    codes = state.columns.finish_codes(rows, tokens, totals, ticket.version if picked is None else -1)
    return tokens, ones(len(rows)), ends, totals, codes


def _extend_unevenly(
    state: State, ticket: Ticket, rows: Rows, tokens: Tokens, counts: Counts, picked: Counts | None
) -> tuple[Tokens, Counts, Counts, Counts, NDArray[np.int8]]:
    """Settle a batch with drafts or uneven `counts`, of all its rows. Append to `rows`, those at its places `picked`
    (None: all). Return the tokens kept; and by row, how many, its computed and known tokens, and its finish code."""
    manager = state.manager
    given, first, ends = counts, counts.cumsum() - counts, ticket.ends
    if picked is not None:
        given, first, ends = given[picked], first[picked], ends[picked]
    kept, codes = state.columns.kept_counts(rows, (tokens, first, given), manager.rows.num_tokens[rows])
    if int(kept.sum()) != len(tokens):
        tokens = tokens[rising_from(first, kept)]
    totals = manager.extend_by(rows, tokens, kept)
    if ticket.draft_counts is not None and ticket.flight is not None:
        drafted = ticket.draft_counts
        accepted = np.minimum(np.maximum(counts - 1, 0), drafted)
        is_void = [place for place, left in ticket.gone.items() if left.is_void]
        num_right = int(accepted.sum() - accepted[is_void].sum())
        state.stats.count("drafted_tokens", int(drafted.sum()))
        state.stats.count("accepted_tokens", num_right)
        if picked is not None:
            accepted, drafted = accepted[picked], drafted[picked]
        ends = ends + accepted
        if manager.layout.states:
            ends = _without_wrong_states(state, rows, ends, accepted, drafted)
        has_drafts = drafted > 0
        manager.reject(ticket.flight, rows[has_drafts], ends[has_drafts])
    if ticket.flight is not None:
        manager.settle(ticket.flight)
    goes_on = codes == 0
    if state.outstanding.batches:
        for row in rows[(given != 1) & goes_on].tolist():
            state.outstanding.void_unknown(state.columns.owner[row], state.columns.sequence.item(row))
    if len(given) and not int(given.min()):
        state.queues.reopen()
        _await_append(state, rows[(given == 0) & goes_on])
    return tokens, kept, ends, totals, codes


def _without_wrong_states(state: State, rows: Rows, ends: Counts, accepted: Counts, drafted: Counts) -> Counts:
    """Return each row's computed tokens, int64 [n]: `ends`, or the start of its share if one of its drafts was wrong,
    because its states have seen that draft. Note that such a row computes up to `ends` again."""
    is_wrong = accepted < drafted
    for row, end in zip(rows[is_wrong].tolist(), ends[is_wrong].tolist(), strict=True):
        state.columns.recover(row, end)
    return np.where(is_wrong, ends - accepted - 1, ends)


def _await_append(state: State, rows: Rows) -> None:
    """Mark rows that got no token: they do not sample until the caller appends tokens. If such a row's request was
    preempted, has no other sequence and is in no batch, it gives its blocks back."""
    manager = state.manager
    for row in rows.tolist():
        request, sequence = state.columns.owner[row], state.columns.sequence.item(row)
        is_out = any(batch.ticket.place_of(row) >= 0 for batch in state.outstanding.batches)
        if is_out or manager.rows.num_launched[row] < manager.rows.num_tokens[row]:
            state.columns.note_sampled(request, sequence)
        if request.status in (Status.PAUSED, Status.SWAPPED) and request.num_live == 1 and not is_out:
            drop_rows(state, request, is_idle=True)
            state.preempted_late.append(request)


def _sampled_elsewhere(ticket: Ticket, tokens: Tokens, counts: Counts | None) -> list[tuple[Left, list[int]]]:
    """Return the tokens that the batch sampled for each sequence that gave its row back while the batch was out."""
    each = ticket.samples.astype(np.int64) if counts is None else counts
    stops = np.cumsum(each)
    gone = [(i, left) for i, left in sorted(ticket.gone.items()) if not left.is_void and ticket.samples[i]]
    return [(left, tokens[stops[i] - each[i] : stops[i]].tolist()) for i, left in gone]


def _deliver(state: State, left: Left, sampled: list[int]) -> Output:
    """Append sampled tokens to a sequence that lost its row while the batch was out. It may have a row again."""
    request, sequence, _ = left
    if not sampled:
        # It waits for tokens from the caller, and must not sample when it is computed again.
        state.columns.note_sampled(request, sequence)
        state.outstanding.void_unknown(request, sequence)
        if request.rows[sequence] < 0 and all(request.has_sampled[i] for i in request.live_sequences):
            state.queues.leave(request)
            state.queues.wait(request, is_idle=True)
        return Output(request.id, sequence, [])
    # The sequence may have no row, so columns of one row say where it ends.
    columns, place, known = RowColumns(1), np.zeros(1, np.int64), np.array([state.books.num_known(request, sequence)])
    columns.bind(0, request, sequence)
    kept, codes = columns.kept_counts(place, (np.array(sampled, np.int32), place, np.array([len(sampled)])), known)
    count, code = kept.item(0), codes.item(0)
    new = np.array(sampled[:count], np.int32)
    state.stats.count("output_tokens", count)
    state.extend(request, sequence, new)
    usage = end_sequences(state, request, [sequence], code) if code else None
    if not code and count != 1 and state.outstanding.batches:
        state.outstanding.void_unknown(request, sequence)
    return Output(request.id, sequence, new.tolist(), FINISH_REASONS[code], usage)


def cancel(state: State, batch: Batch, moved: bool) -> None:
    """Take back the latest batch, which did not run. Unless its copies ran (`moved`), a later batch runs them."""
    manager, ticket = state.manager, batch.ticket
    state.stats.count("cancelled_tokens", batch.num_scheduled_tokens)
    broken = _whose_states_break(state, ticket)
    rolled_back = {} if ticket.flight is None else manager.take_back(ticket.flight)
    manager.growth.put_back_changes(batch.table_rows, batch.table_columns, batch.table_blocks)
    state.queues.reopen()
    state.running.change()
    for row, lost in rolled_back.items():
        request = state.columns.owner[row]
        request.count("hit_tokens", -lost)
        if request.num_loading:
            # It lost blocks while it was loading: it waits again, and asks for its loads at its next admission.
            drop_rows(state, request)
            request.await_load(None)
    for request in broken:
        # The batch has overwritten its states.
        drop_rows(state, request)
    state.carried.keep(batch, moved)
    state.outstanding.let_go(batch.number)


def _whose_states_break(state: State, ticket: Ticket) -> list[RequestState]:
    """Return the requests that a cancel of the batch leaves without a usable state; note their computed tokens."""
    if ticket.flight is None or not state.manager.layout.states:
        return []
    starts = {share.row: share.start for share in ticket.flight.shares()}
    # A state that went to the host is the one after the batch.
    is_away, reads = state.manager.rows.num_blocks == 0, ticket.flight.reads
    broken = {
        state.columns.owner[row]: None for row, start in starts.items() if start and (row not in reads or is_away[row])
    }
    for request in broken:
        state.remember_high_water(request, starts)
    return list(broken)


def end_request(state: State, request: RequestState, code: int, sentence: str) -> list[Output]:
    """End the request in any state. Return the last output of each live sequence, the usage with the last one."""
    live = request.live_sequences
    usage = end_sequences(state, request, live, code, sentence)
    return [Output(request.id, i, [], FINISH_REASONS[code], usage if i == live[-1] else None) for i in live]


def reject_overgrown(state: State) -> None:
    """End requests that can never fit since the caller appended tokens to them."""
    books = state.books
    sentence = f"was rejected: appended tokens brought it over the {books.max_total} tokens that can ever fit."
    for request in state.to_reject:
        longest, sequences = books.max_total_of(len(request.rows)), range(len(request.rows))
        is_overgrown = any(books.num_known(request, sequence) >= longest for sequence in sequences)
        if state.requests.get(request.id) is request and is_overgrown:
            state.pending_outputs.extend(end_request(state, request, REJECTED, sentence))
    state.to_reject.clear()


def end_sequences(
    state: State, request: RequestState, sequences: list[int], code: int, sentence: str | None = None
) -> RequestUsage | None:
    """End live sequences of a request and release their rows. If none is left, end the request and return its usage.

    code      why they end: an index into FINISH_REASONS
    sentence  None: they finish. Their lengths count for guesses, and their content is kept as the request wishes.
              Otherwise they are cut off, and this is what `explain` says of the request
    """
    state.queues.reopen()
    is_last = len(sequences) == request.num_live
    if is_last:
        state.queues.leave(request)
        if request.num_loading and any(batch.number == request.load_batch for batch in state.outstanding.batches):
            state.outstanding.hold(request, request.load_batch)
    elif request.status is Status.RUNNING:
        state.running.leave([request.rows[sequence] for sequence in sequences])
    if request.request.saves:
        state.outstanding.hold(request, request.id)
    for sequence in sequences:
        num_output, is_turn = state.books.num_output(request, sequence), is_last and sequence == sequences[-1]
        way = _way_left(state, request, -1 if sentence else request.rows[sequence], is_turn=is_turn)
        if sentence is None:
            state.lengths.note(num_output)
            if state.foresight is not None:
                state.foresight.finished(pause=request.longest_pause)
        request.note_ended(num_output)
        state.unseat(request, sequence, None)
        _keep(state, request, way, num_output, is_turn=is_turn)
    if not is_last:
        return None
    state.books.lift_bound(request)
    state.end(request, _STATUS.get(code, Status.FINISHED), sentence or f"has finished ({FINISH_REASONS[code]}).")
    return request.usage()


def _way_left(state: State, request: RequestState, row: int, *, is_turn: bool) -> list[Node] | None:
    """Return the way that a finished row leaves, [] if nothing asks for it; None if there is no such row (-1)."""
    if row < 0:
        return None
    its = request.request
    is_wanted = request.hints or its.retention is not None or (is_turn and its.session_id is not None)
    return state.manager.content.ways.way_of(row) if is_wanted or state.quotas is not None else []


def _keep(state: State, request: RequestState, way: list[Node] | None, num_output: int, *, is_turn: bool) -> None:
    """Keep the content that a released row left, as the request, its session and its hints wish; count it in its
    tenant's quota. `is_turn`: the whole request, and so a turn of its session, ends with this row."""
    its, content = request.request, state.manager.content.ways
    if is_turn and its.session_id is not None:
        state.hints.sessions.end(its.session_id, way, num_output)
    if not way:
        return
    if its.retention is not None:
        until = math.inf if its.retention.lasts is None else state.now + its.retention.lasts
        content.retain_way(way, int(its.retention.priority), until if until < math.inf else None, was_left=True)
    if is_turn:
        state.hints.finish(request, way)
    if state.quotas is not None:
        state.quotas.note(its.tenant, way, request.hit_tokens if its.num_sequences == 1 else 0)
