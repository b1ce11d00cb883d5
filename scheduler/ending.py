"""How a batch ends: what was sampled is written down, who has ended goes, and a cancelled batch leaves no trace.

Knows batches that have not ended and what becomes of their rows. Does not decide what runs next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_manager import InvalidTokens, token_array
from scheduler.batch import Batch, Output, Outputs, RequestUsage
from scheduler.composition import ones
from scheduler.errors import WrongTokens
from scheduler.preemption import drop_rows
from scheduler.request import RequestState
from scheduler.rows import Rows
from scheduler.state import Carried, State
from scheduler.status import ABORT, FINISH_REASONS, REJECTED, Status
from scheduler.stopping import finish_codes, kept_tokens

Counts = NDArray[np.int64]
_INT64 = np.dtype(np.int64)
_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
_FINISHED = tuple((Status.FINISHED, f"has finished ({reason}).") for reason in FINISH_REASONS)


def validated_tokens(
    state: State, batch: Batch, token_ids: Any, counts: Any
) -> tuple[NDArray[np.int32], Counts | None]:
    """The new tokens as int32 [sum], and how many of each row as int64 [n] (None: one for each row that samples).

    Raises WrongTokens when they do not fit the batch.
    """
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
    # One for each row that samples, said explicitly, is told by its bytes: a reduction costs more.
    usual = ones(len(rows)) if ticket.all_sample else samples.astype(np.int64)
    if array.dtype == _INT64 and array.tobytes() == usual.tobytes() and len(tokens) == ticket.num_samples:
        return tokens, None
    if array.size and not (int(array.min()) >= 0 and int(array.max()) <= len(tokens)):
        # Sums of larger ones wrap.
        raise WrongTokens(
            f"batch {batch.number}: counts have to be from 0 to the {len(tokens)} tokens that came; got {array.min()} to {array.max()}."
        )
    array = array.astype(np.int64)
    if array[~samples].any():
        row = int(rows[(array > 0) & ~samples][0])
        raise WrongTokens(f"batch {batch.number}: row {row} does not sample in it, and got tokens.")
    if int(array.sum()) != len(tokens):
        raise WrongTokens(f"batch {batch.number}: counts add up to {int(array.sum())}; got {len(tokens)} tokens.")
    return tokens, None if array.tobytes() == usual.tobytes() else array


def update(state: State, batch: Batch, tokens: NDArray[np.int32], counts: Counts | None) -> Outputs:
    """The batch ran: confirm its tokens, append what was sampled, end who has ended."""
    manager, ticket = state.manager, batch.ticket
    rows = ticket.rows
    _account(state, batch)
    manager.settle(rows, ticket.ends, ticket.chunk_rows)
    manager.forget_sharers(batch.number)
    state.num_in_flight -= len(rows)
    doomed = state.doomed
    gone = [row for request in doomed for row in request.rows] if doomed else []
    if state.ending_rows:
        gone += _end_rows_of_callers(state)
    if counts is not None:
        return _update_ragged(state, batch, tokens, counts, gone)
    ids, sequences, ends = batch.ids, batch.sequences, ticket.ends
    if not ticket.all_sample:
        picked = ticket.samples.nonzero()[0]
        rows, ids, sequences, ends = rows[picked], ids[picked], sequences[picked], ends[picked]
    if gone:
        is_kept = ~np.isin(rows, gone)
        rows, ids, sequences, ends, tokens = (
            rows[is_kept],
            ids[is_kept],
            sequences[is_kept],
            ends[is_kept],
            tokens[is_kept],
        )
    totals = manager.extend(rows, tokens, ends)
    codes, done = finish_codes(state.columns, rows, tokens, totals)
    state.stats.output_tokens += len(rows)
    may_be_steady = ticket.covers_running and rows is ticket.rows and not state.outstanding
    usage = {}
    if len(done):
        goes_on = np.empty(len(rows), np.bool_)
        goes_on.fill(True)
        goes_on[done] = False
        left = rows[goes_on]
        if may_be_steady and state.running_rows.replace(rows, left):
            state.steady = (left, ends[goes_on], totals[goes_on])
        else:
            state.running_rows.leave(rows[done].tolist())
        usage = _end_rows(state, rows, codes, done)
    elif may_be_steady:
        # What leaves or joins from now on makes another array, and so is told from this one by identity.
        state.steady = (rows, ends, totals)
    if doomed:
        _end_doomed(state)
    return Outputs(ids, sequences, tokens, ones(len(rows)), codes, usage, take_pending(state))


def _update_ragged(state: State, batch: Batch, tokens: NDArray[np.int32], counts: Counts, gone: list[int]) -> Outputs:
    """`update` where rows got none or several tokens: event by event."""
    manager = state.manager
    is_gone = set(gone)
    starts = np.cumsum(counts) - counts
    places: list[int] = []
    codes: list[int] = []
    kept: list[NDArray[np.int32]] = []
    for i, row in enumerate(batch.ticket.rows.tolist()):
        if row in is_gone or not batch.ticket.samples[i]:
            continue
        new = tokens[starts[i] : starts[i] + counts[i]]
        count, code = kept_tokens(state.columns, row, new.tolist(), int(manager.num_tokens[row]))
        if count:
            manager.append(row, new[:count])
        places.append(i)
        codes.append(code)
        kept.append(new[:count])
    packed = np.concatenate(kept) if kept else _NO_TOKENS
    state.stats.output_tokens += len(packed)
    ended = np.array(codes, np.int8)
    rows, done = batch.ticket.rows[places], ended.nonzero()[0]
    state.running_rows.leave(rows[done].tolist())
    usage = _end_rows(state, rows, ended, done)
    _end_doomed(state)
    lengths = np.array([len(part) for part in kept], np.int64)
    return Outputs(batch.ids[places], batch.sequences[places], packed, lengths, ended, usage, take_pending(state))


def cancel(state: State, batch: Batch, moved: bool) -> None:
    """The batch did not run: what it put in flight is taken back, and its moves are carried over if they did not run."""
    manager = state.manager
    state.stats.cancelled_tokens += batch.num_scheduled_tokens
    rolled_back = manager.cancel(batch.ticket.rows)
    manager.forget_sharers(batch.number)
    state.num_in_flight -= len(batch.ticket.rows)
    state.is_shut = False
    for row, lost in rolled_back.items():
        owner = state.columns.owner[row]
        owner.hit_tokens -= lost
        if owner.num_asked:
            _ask_again(state, owner)
    loads = wanted_loads(state, batch.loads, batch.number)
    if not moved and (len(batch.moves) or len(loads)):
        # Cancels come latest first, so this batch's moves run before what is carried already.
        state.carried.insert(0, Carried(batch.moves, loads, batch.number))
    if state.ending_rows:
        _end_rows_of_callers(state)
    _end_doomed(state)


def wanted_loads(state: State, loads: NDArray[np.int32], number: int) -> NDArray[np.int32]:
    """Those of batch `number`'s loads whose request still waits for them, int32 [k, 3]."""
    owners = [state.columns.owner[row] for row in loads[:, 0].tolist()]
    is_wanted = [owner is not None and owner.num_asked > 0 and owner.load_batch == number for owner in owners]
    return loads[np.array(is_wanted, np.bool_)]


def forget_stale_carried(state: State) -> None:
    """Drop carried loads for which nobody waits any more: an empty remainder must not hold a step up."""
    state.carried = [c for c in state.carried if len(c.moves) or len(wanted_loads(state, c.loads, c.number))]


def num_output_of(state: State, request: RequestState) -> int:
    """Output tokens of all its sequences so far, those that have ended and those that live."""
    return request.num_output + sum(_num_written(state, request, i) for i in range(len(request.rows)))


def take_pending(state: State) -> list[Output]:
    """Outputs of requests that ended outside a batch and have not been delivered."""
    pending, state.pending_outputs = state.pending_outputs, []
    return pending


def end_request(state: State, request: RequestState, code: int, sentence: str) -> list[Output]:
    """A request with no row in flight ends now: everything it holds goes back. Returns the last output of each live sequence,
    the last one with the usage."""
    state.is_shut = False
    if request.id in state.parked:
        del state.parked[request.id]
    elif request.status is Status.WAITING:
        state.waiting.remove(request)
    elif request.status is Status.RUNNING:
        state.stop_running(request, request.live_rows)
    else:
        state.away.remove(request)
    request.num_output = num_output_of(state, request)
    ended = [i for i, row in enumerate(request.rows) if row >= 0 or request.tokens[i] is not None]
    for i in ended:
        if request.rows[i] >= 0:
            state.close_row(request, i)
    for group in (state.bounded, state.to_reject, state.doomed):
        if request in group:
            group.remove(request)
    status = {ABORT: Status.ABORTED, REJECTED: Status.REJECTED}.get(code, Status.FINISHED)
    state.end(request, (status, sentence))
    usage = state.usage_of(request)
    return [Output(request.id, i, [], FINISH_REASONS[code], usage if i == ended[-1] else None) for i in ended]


def doom(state: State, request: RequestState, code: int) -> None:
    """The request, which a batch holds, goes with this finish code when its batches have ended; nothing of it is delivered again."""
    request.end_code = code
    state.doomed.append(request)
    for row in request.live_rows:
        state.ending_rows.pop(row, None)
    if request in state.to_reject:
        state.to_reject.remove(request)


def finish(state: State, request: RequestState, sequence: int, code: int) -> Output:
    """A sequence with an output to come ends with this finish code: now, or when the batch that holds it has ended. Returns its last
    output, with the usage if no other sequence has one to come."""
    is_last = not any(state.delivers(request, other) for other in range(len(request.rows)) if other != sequence)
    usage = state.usage_of(request, num_output_of(state, request)) if is_last else None
    row = request.rows[sequence]
    if is_last and state.is_held(request):
        doom(state, request, code)
    elif row >= 0 and state.manager.batch_of_row[row]:
        state.ending_rows[row] = code
    else:
        _end_sequence(state, request, sequence, code)
    return Output(request.id, sequence, [], FINISH_REASONS[code], usage)


def _end_sequence(state: State, request: RequestState, sequence: int, code: int) -> None:
    """A sequence that no batch holds ends: what it holds goes back, and with the last one the request ends."""
    row = request.rows[sequence]
    if row >= 0:
        _note_finished(state, request, sequence, row)
    if request.num_live == 1:
        end_request(state, request, code, _FINISHED[code][1])
        return
    state.is_shut = False
    request.num_output += _num_written(state, request, sequence)
    request.num_live -= 1
    if row >= 0:
        if request.status is Status.RUNNING:
            state.running_rows.leave([row])
        state.close_row(request, sequence)
    request.tokens[sequence] = None
    if request in state.to_reject:
        longest = state.max_total_of(len(request.rows))
        if all(_num_known(state, request, other) < longest for other in range(len(request.rows))):
            state.to_reject.remove(request)


def _end_rows_of_callers(state: State) -> list[int]:
    """End the sequences that the caller ended in a batch that has ended by now. Returns their rows."""
    ended = [row for row in state.ending_rows if not state.manager.batch_of_row[row]]
    for row in ended:
        request: RequestState = state.columns.owner[row]
        _end_sequence(state, request, int(state.columns.sequence[row]), state.ending_rows.pop(row))
    return ended


def _num_known(state: State, request: RequestState, sequence: int) -> int:
    """Tokens that a live sequence knows; 0 for one that has ended."""
    row, known = request.rows[sequence], request.tokens[sequence]
    if row >= 0:
        return int(state.manager.num_tokens[row])
    return 0 if known is None else len(known)


def _num_written(state: State, request: RequestState, sequence: int) -> int:
    """Output tokens of a live sequence; 0 for one that has ended."""
    known = _num_known(state, request, sequence)
    return known - request.prompt_len - request.appended[sequence] if known else 0


def _note_finished(state: State, request: RequestState, sequence: int, row: int) -> None:
    """A sequence that holds a row has finished: its length is learnt from, and its content kept as its request wishes."""
    if state.foresight is not None:
        num_output = _num_written(state, request, sequence)
        state.foresight.finished(num_output, pause=request.longest_pause)
    state.retain_content(request, row)


def _account(state: State, batch: Batch) -> None:
    stats = state.stats
    if len(batch.ticket.rows):
        stats.steps += 1
    stats.computed_tokens += len(batch.token_ids)
    if not state.recovering:
        return
    manager = state.manager
    for row, high in list(state.recovering.items()):
        if manager.batch_of_row[row] != batch.number:
            continue
        start = int(manager.num_computed[row])
        stop = start + int(manager.num_scheduled[row])
        again = max(0, min(high, stop) - start)
        stats.recomputed_tokens += again
        state.columns.owner[row].recomputed_tokens += again
        if stop >= high:
            del state.recovering[row]


def _ask_again(state: State, request: RequestState) -> None:
    """A loading request lost blocks before those that were to be loaded: it asks again when it is admitted again."""
    state.away.remove(request)
    drop_rows(state, request)
    request.num_asked = 0
    request.wants_load = True
    request.status = Status.WAITING
    state.waiting.add(request)


def _end_doomed(state: State) -> None:
    for request in list(state.doomed):
        if state.is_held(request):
            continue
        if request.end_code == ABORT:
            end_request(state, request, ABORT, "was aborted.")
            continue
        for sequence, row in enumerate(request.rows):
            if row >= 0 or request.tokens[sequence] is not None:
                _end_sequence(state, request, sequence, request.end_code)


def _end_rows(state: State, rows: Rows, codes: NDArray[np.int8], done: NDArray[np.int64]) -> dict[int, RequestUsage]:
    """End the sequences at places `done`, which are no running rows any more. Returns, by place, what each request that ended
    with them took."""
    usage: dict[int, RequestUsage] = {}
    state.is_shut = False
    columns, num_tokens = state.columns, state.manager.num_tokens
    # Few end in one step: an entry at a time costs less than an array of them.
    for i in done.tolist():
        row, code = rows.item(i), codes.item(i)
        request: RequestState = columns.owner[row]
        sequence, total = columns.sequence.item(row), num_tokens.item(row)
        request.num_output += total - request.prompt_len - request.appended[sequence]
        request.num_live -= 1
        _note_finished(state, request, sequence, row)
        state.close_row(request, sequence)
        if request.num_live == 0:
            state.running.remove(request)
            request.follows = None
            if request.is_bounded:
                state.bounded.remove(request)
            state.end(request, _FINISHED[code])
            usage[i] = state.usage_of(request)
        elif state.ending_rows and not any(state.delivers(request, other) for other in range(len(request.rows))):
            # Those that are left were ended by the caller, in batches that are out.
            usage[i] = state.usage_of(request, num_output_of(state, request))
            doom(state, request, code)
    return usage
