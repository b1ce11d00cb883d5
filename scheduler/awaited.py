"""Tokens that batches which are out will sample: how many each row waits for, and where each value comes from.

    batch 7 | row 3 samples at place 0 |      batch 8 | row 3 computes that token: its value comes from (7, 0) |

Knows tickets of batches that have not ended. Does not know what a token is worth: a stop makes the rest void, and update() tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .rows import Rows

if TYPE_CHECKING:
    from .batch import Batch
    from .request import RequestState
    from .state import State

Counts = NDArray[np.int64]
Source = tuple[int, int]
"""Batch number, and place among its rows."""


class Awaited:
    """Of each row, int64 [rows]: samples that are out, and where the latest one comes from; and bool [rows], whether it has drafts of
    which it is not known yet how many are right."""

    def __init__(self, num_rows: int, outstanding: list[Batch]) -> None:
        self.num = np.zeros(num_rows, np.int64)
        self.batch = np.full(num_rows, -1, np.int64)
        self.place = np.full(num_rows, -1, np.int64)
        self.is_undecided = np.zeros(num_rows, np.bool_)
        for batch in outstanding:
            ticket = batch.ticket
            places = ticket.places_sampled()
            self._note(ticket.rows[places], batch.number, places)
            if ticket.draft_counts is not None:
                self.is_undecided[ticket.rows[places]] |= ticket.draft_counts[places] > 0
            for place, heir in ticket.gone.items():
                if heir is not None and ticket.samples[place] and (row := heir[0].rows[heir[1]]) >= 0:
                    self._note(np.array([row]), batch.number, np.array([place]))
                    self.is_undecided[row] |= ticket.has_drafts(place)

    def _note(self, rows: Rows, number: int, places: Counts) -> None:
        self.num[rows] += 1
        self.batch[rows] = number
        self.place[rows] = places


def sources_of(state: State, request: RequestState, sequence: int) -> list[Source]:
    """Where the tokens come from that the sequence will know when all batches that are out have ended, in order."""
    row = request.rows[sequence]
    found: list[Source] = []
    for batch in state.outstanding:
        ticket = batch.ticket
        for place, heir in ticket.gone.items():
            if heir is not None and heir[0] is request and heir[1] == sequence and ticket.samples[place]:
                found.append((batch.number, place))
        place = ticket.place_of(row)
        if place >= 0 and ticket.samples[place]:
            found.append((batch.number, place))
    return found


def is_undecided(state: State, request: RequestState, sequence: int) -> bool:
    """Whether a batch that is out has drafts of the sequence: how many are right decides where it goes on."""
    row = request.rows[sequence]
    for batch in state.outstanding:
        ticket = batch.ticket
        if ticket.draft_counts is None:
            continue
        place = ticket.place_of(row)
        if place >= 0 and ticket.has_drafts(place):
            return True
        if any(
            heir is not None and heir[0] is request and heir[1] == sequence and ticket.has_drafts(at)
            for at, heir in ticket.gone.items()
        ):
            return True
    return False


def totals_of(state: State, rows: Rows) -> Counts:
    """Tokens that each of these rows will know when all batches that are out have ended, int64 [n], as far as that is foreseen; those
    that are launched, for a row that ends with them at its full length, has undecided drafts, or has to know them first."""
    known = state.manager.num_tokens[rows]
    if state.awaited is None:
        return known
    num_awaited = state.awaited.num[rows]
    totals: Counts = known + num_awaited
    ends = (num_awaited > 0) & (totals >= state.columns.max_total[rows])
    ends |= state.awaited.is_undecided[rows]
    if state.resumes_known:
        goes_on = state.awaited.batch[rows] == state.batch_before
        if state.retold:
            goes_on &= ~np.isin(rows, list(state.retold))
        ends |= (num_awaited > 0) & ~goes_on
    return np.where(ends, np.minimum(totals, state.manager.num_launched[rows]), totals)
