"""Forks: one more sequence of a request that runs, from where one of its sequences is.

    r1 / 0 | known ... 17 |   fork   | r1 / 0 | ... 17 |
                                     | r1 / 1 | ... 17 |

A beam search forks the sequences that go on best. All full blocks are shared; the partial one is copied at once, because both go on to
write it, and the copy runs before the next batch.
"""

from __future__ import annotations

from paged.errors import InvalidRequest, RequestInFlight

from .request import RequestState, replaced
from .state import State
from .status import Status

# What a request's state says of each of its sequences.
_BY_SEQUENCE = ("max_total", "high_water", "appended", "is_quiet")


def fork(state: State, request: RequestState, sequence: int) -> int:
    """A new sequence of the request, which knows what this live one does. Returns its number.

    Raises InvalidRequest (the sequence does not run, its request is private, the policy reserves or runs batches whole, or there is no
    seat), RequestInFlight, or OutOfBlocks (no block for the copy), changing nothing.
    """
    if request.status is not Status.RUNNING:
        raise InvalidRequest(f'request "{request.id}" is {request.status.value}; only sequences that run have forks.')
    if state.outstanding.computes(request) or state.outstanding.is_busy(request.id):
        raise RequestInFlight(request.id)
    if request.request.is_private:
        raise InvalidRequest(f'request "{request.id}": a request that shares nothing with others has no forks.')
    seats = state.limits.max_sequences
    if state.reservation.reserves or not state.admission.joins:
        raise InvalidRequest(
            f'request "{request.id}": policy "{state.policy.name}" reserves what a request may become at worst; it has no forks.'
        )
    if state.running_rows.num >= seats:
        raise InvalidRequest(
            f'request "{request.id}": {state.running_rows.num} sequences run already; max_sequences is {seats}.'
        )
    row = request.rows[sequence]
    state.columns.ensure(state.columns.num_bound + 1)
    # A batch that is out may be cancelled: its moves would run with what leaves the device now.
    state.manager.copy_content(not state.outstanding.batches and state.carried.are_of_forks)
    child, moves = state.manager.fork_to_write(row)
    request.is_plain = False
    request.num_live += 1
    # Numbers of forks that are gone are given again, or a search would have ever more of them.
    own, num = request.request.num_sequences, len(request.rows)
    number = next((number for number in range(own, num) if not state.delivers(request, number)), num)
    if number == num:
        request.rows.append(child)
        request.tokens.append(None)
    request.rows[number] = child
    for name in _BY_SEQUENCE:
        values = getattr(request, name)
        setattr(request, name, replaced(values, number, values[sequence]))
    state.columns.bind(child, request, number)
    if row in state.silent:
        state.silent.add(child)
    if row in state.recovering:
        state.recovering[child] = state.recovering[row]
    state.running_rows.join([child], at_end=False)
    # What was known of the rows that run, and of the request's worst case, was of the sequences that it had.
    state.books.lift_bound(request)
    state.steady = None
    state.columns.advance_unevenly()
    if len(moves):
        state.carried.add_copy(*moves.device_to_device[0].tolist())
    return number
