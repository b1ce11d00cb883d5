"""Forks: one more sequence of a running request, from the state of one of its sequences.

    r1 / 0 | known ... 17 |   fork   | r1 / 0 | ... 17 |
                                     | r1 / 1 | ... 17 |

Full blocks are shared. The partial one is copied before the next batch, because both sequences will write it.
"""

from __future__ import annotations

from paged.errors import InvalidRequest, RequestInFlight

from .request import RequestState, Status
from .state import State


def fork(state: State, request: RequestState, sequence: int) -> int:
    """Fork a live sequence. Return the number of the new one. Raises as `Scheduler.fork` does, changing nothing."""
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
    # An outstanding batch may be cancelled: its moves would run together with copies made now.
    state.manager.copy_content(not state.outstanding.batches and state.carried.are_of_forks)
    child, moves = state.manager.fork_to_write(row)
    number = request.add_fork(sequence, child)
    state.columns.bind(child, request, number)
    if row in state.columns.recovering:
        state.columns.recover(child, state.columns.recovering[row])
    state.running_rows.join([child], at_end=False)
    # What is cached of the running rows and of the worst case does not count the new sequence.
    state.books.lift_bound(request)
    state.running_rows.unsettle()
    state.columns.advance_unevenly()
    for source, copy in moves.device_to_device.tolist():
        state.carried.add_copy(source, copy)
    return number
