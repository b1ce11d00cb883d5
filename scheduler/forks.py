"""Forks: a sequence that runs goes on twice, and takes one of its forks' places again.

    r1 / 0 | known ... 17 |   fork   | r1 / 0 | ... 17 |   drafts, tokens   | r1 / 0 | ... 17 5 |   adopt
                                     | r1 / 1 | ... 17 |                    | r1 / 1 | ... 17 9 4 |    r1 / 0 | ... 17 9 4 |

A tree of drafts is forks of a sequence with a branch of drafts each, a beam search forks those that go on best. All full blocks are
shared; the partial one is copied at once, because both go on to write it, and the copy runs before the next batch. Knows sequences, rows
and that copy. Does not know why somebody forks, nor which fork is the right one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.block_manager.moves import Moves, pairs_of
from paged.scheduler.errors import InvalidRequest, RequestInFlight
from paged.scheduler.request import RequestState, replaced
from paged.scheduler.state import Carried, State
from paged.scheduler.status import Status

_NO_LOADS: NDArray[np.int32] = np.empty((0, 3), np.int32)
# What a request's state says of each of its sequences.
_BY_SEQUENCE = ("max_total", "high_water", "appended", "is_quiet")
# What is carried for no batch.
_NO_BATCH = 0


def fork(state: State, request: RequestState, sequence: int) -> int:
    """A new sequence of the request, which knows what this one does. Returns its number.

    Raises InvalidRequest (the sequence does not run, the policy reserves or runs batches whole, or there is no seat), RequestInFlight, or
    OutOfBlocks (no block for the copy), changing nothing.
    """
    _must_run(state, request, sequence)
    policy, seats = state.policy, state.limits.max_sequences
    if state.reservation.reserves or policy.batching != "continuous":
        raise InvalidRequest(
            f'request "{request.id}": policy "{policy.name}" reserves what a request may become at worst; it has no forks.'
        )
    if state.running_rows.count() >= seats:
        raise InvalidRequest(
            f'request "{request.id}": {state.running_rows.count()} sequences run already; max_sequences is {seats}.'
        )
    row = request.rows[sequence]
    state.columns.ensure(state.columns.num_bound + 1)
    child, moves = state.manager.fork_to_write(row)
    request.is_plain = False
    request.num_live += 1
    # A tree of drafts a step: numbers of forks that are gone are given again, or there would be ever more of them.
    own, num = request.request.num_sequences, len(request.rows)
    number = next((number for number in range(own, num) if not state.delivers(request, number)), num)
    if number == num:
        request.rows.append(child)
        request.tokens.append(None)
    request.rows[number] = child
    for name in _BY_SEQUENCE:
        values = getattr(request, name)
        setattr(request, name, (*values[:number], values[sequence], *values[number + 1 :]))
    state.columns.bind(child, request, number)
    if row in state.silent:
        state.silent.add(child)
    if row in state.recovering:
        state.recovering[child] = state.recovering[row]
    _give_no_bound(state, request)
    state.running_rows.join([child], at_end=False)
    _go_on_unevenly(state)
    if len(moves):
        _carry(state, *moves.device_to_device[0].tolist())
    return number


def adopt(state: State, request: RequestState, of: int, sequence: int) -> None:
    """The sequence goes on as `of`, another one of its request, which is none from now on: it takes its tokens and its blocks.

    Raises InvalidRequest (one of them does not run, or both are the same) or RequestInFlight, changing nothing.
    """
    if of == sequence:
        raise InvalidRequest(f'request "{request.id}": sequence {sequence} cannot adopt itself.')
    for each in (sequence, of):
        _must_run(state, request, each)
    state.running_rows.leave([request.rows[sequence]])
    state.close_row(request, sequence)
    row = request.rows[of]
    request.rows[sequence], request.rows[of] = row, -1
    for name in _BY_SEQUENCE:
        values = getattr(request, name)
        setattr(request, name, replaced(values, sequence, values[of]))
    state.columns.release(row, of)
    state.columns.bind(row, request, sequence)
    request.num_live -= 1
    # The rows of a request stand in the order of its sequences.
    state.running_rows.reorder()
    state.admission_blocked = False
    _give_no_bound(state, request)
    _go_on_unevenly(state)


def _carry(state: State, source: int, copy: int) -> None:
    """The copy runs with the next batch. Engines run the pairs of a group at once: none reads what another one writes."""
    last = state.carried[-1] if state.carried else None
    pairs = {} if last is None or last.number != _NO_BATCH else dict(last.moves.device_to_device[:, ::-1].tolist())
    # What is still to be copied itself is read where it comes from. A copy whose fork is gone gives way.
    pairs[copy] = pairs.get(source, source)
    moves = Moves(device_to_device=pairs_of([(read, written) for written, read in pairs.items()]))
    if last is None or last.number != _NO_BATCH or pairs.keys() & set(pairs.values()):
        moves = Moves(device_to_device=pairs_of([(source, copy)]))
        state.carried.append(Carried(moves, _NO_LOADS, _NO_BATCH))
    else:
        last.moves = moves


def _must_run(state: State, request: RequestState, sequence: int) -> None:
    if not 0 <= sequence < len(request.rows) or not state.delivers(request, sequence):
        raise InvalidRequest(f'request "{request.id}" has no live sequence {sequence}.')
    if request.status is not Status.RUNNING:
        raise InvalidRequest(f'request "{request.id}" is {request.status.value}; only sequences that run have forks.')
    if state.is_in_flight(request) or request.id in state.busy_ids or state.waits_for_transfer(request.rows[sequence]):
        raise RequestInFlight(request.id)


def _give_no_bound(state: State, request: RequestState) -> None:
    """What was reserved for the request was the worst case of the sequences that it had."""
    if request.is_bounded:
        request.is_bounded = False
        state.bounded.remove(request)


def _go_on_unevenly(state: State) -> None:
    state.steady = None
    state.columns.advance_unevenly()
