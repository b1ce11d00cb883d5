"""What the scheduler keeps of each row, as a structure of arrays, and which rows run.

Knows limits, stop ids and owners by row. Does not know blocks; the memory layer keeps tokens and tables.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scheduler.request import RequestState

Rows = NDArray[np.int64]


class RowColumns:
    """Columns by row; they grow with the memory layer's.

    max_total  int64: tokens at which the sequence has its full length
    min_total  int64: tokens before which no stop id counts
    prompt_total, expected_total
               int64: tokens that are not outputs, and those that it is thought to have in the end (0: nobody knows)
    stops      int32 [rows, k]: EOS and stop ids, -1 where there are fewer
    reserved   int64: tokens for which blocks are kept by count; only where the policy does so
    owner      object: the RequestState; id: its id; sequence int64: which sequence of it
    """

    def __init__(self, num_rows: int = 64) -> None:
        self._num_rows = num_rows
        self.max_total = np.zeros(num_rows, np.int64)
        self.min_total = np.zeros(num_rows, np.int64)
        self.prompt_total = np.zeros(num_rows, np.int64)
        self.expected_total = np.zeros(num_rows, np.int64)
        self.reserved = np.zeros(num_rows, np.int64)
        self.stops = np.full((num_rows, 1), -1, np.int32)
        self.owner: NDArray[np.object_] = np.empty(num_rows, object)
        self.id: NDArray[np.object_] = np.empty(num_rows, object)
        self.sequence = np.zeros(num_rows, np.int64)
        self.has_stops = np.zeros(num_rows, np.bool_)
        # Rows with any stop id: none, and a step need not look.
        self.num_with_stops = 0
        # Rows of which it is known that none reaches its full length before the first of them has so many tokens.
        self._unfilled: tuple[Rows, int] | None = None
        # Rows of sequences that are not the first of their request.
        self.num_later = 0

    def bind(self, row: int, state: RequestState, sequence: int) -> None:
        """The row serves this sequence of the request from now on."""
        if row >= self._num_rows:
            self._grow(row + 1)
        request = state.request
        self.max_total[row] = state.max_total[sequence]
        before = state.prompt_len + state.appended[sequence]
        self.min_total[row] = before + request.min_tokens
        self.prompt_total[row] = before
        self.expected_total[row] = 0 if request.expected_tokens is None else before + request.expected_tokens
        self.owner[row] = state
        self.id[row] = request.id
        self.sequence[row] = sequence
        if sequence:
            self.num_later += 1
        stops = state.stops
        if not stops:
            return
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self._num_rows, len(stops)), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row, : len(stops)] = stops
        self.has_stops[row] = True
        self.num_with_stops += 1

    def reach_length(self, rows: Rows, totals: NDArray[np.int64]) -> bool:
        """Whether any of these rows has its full length, with `totals` tokens each, int64 [n].

        Asked for the same array again it is known for as many steps as the nearest one has tokens to go: whoever makes the rows advance
        unevenly says so (`advance_unevenly`).
        """
        if self._unfilled is not None and self._unfilled[0] is rows and totals.item(0) < self._unfilled[1]:
            return False
        if not len(rows):
            return False
        slack = int((self.max_total[rows] - totals).min())
        self._unfilled = (rows, totals.item(0) + slack)
        return slack <= 0

    def advance_unevenly(self) -> None:
        """Rows that ran together do not any more, or a row's full length is another one."""
        self._unfilled = None

    def release(self, row: int, sequence: int) -> None:
        """The row, which served this sequence of its request, serves nobody."""
        self.owner[row] = None
        self.id[row] = None
        if sequence:
            self.num_later -= 1
        if self.has_stops[row]:
            self.has_stops[row] = False
            self.stops[row] = -1
            self.num_with_stops -= 1

    def _grow(self, least: int) -> None:
        size = max(least, 2 * self._num_rows)
        for name in (
            "max_total",
            "min_total",
            "prompt_total",
            "expected_total",
            "reserved",
            "owner",
            "id",
            "sequence",
            "has_stops",
        ):
            column = getattr(self, name)
            grown = np.zeros(size, column.dtype) if column.dtype != object else np.empty(size, object)
            grown[: self._num_rows] = column
            setattr(self, name, grown)
        stops = np.full((size, self.stops.shape[1]), -1, np.int32)
        stops[: self._num_rows] = self.stops
        self.stops = stops
        self._num_rows = size


class RunningRows:
    """The rows of running requests in their order, int64 [n].

    Kept as an array between steps. After a batch that had them all, the batch's own array is kept (`adopt`), without the rows
    that ended with it (`replace`). Else rows that join at the end are appended and rows that leave are masked out, both once
    a step; only one that joins in the middle (a returning request) makes it anew.
    """

    def __init__(self) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._joined: list[int] = []
        self._left: list[int] = []
        self._is_stale = False
        self._num_unknown = 0
        self._mark = np.zeros(64, np.bool_)

    def count(self) -> int:
        """How many rows run; an upper bound while the array has to be made anew."""
        return len(self._rows) + len(self._joined) - len(self._left) + self._num_unknown

    def join(self, rows: list[int], *, at_end: bool) -> None:
        """These rows run from now on; `at_end`: after all others."""
        if self._left:
            self._mask_out()
        if at_end:
            self._joined += rows
        else:
            self._is_stale = True
            self._num_unknown += len(rows)

    def leave(self, rows: list[int]) -> None:
        """These rows run no more."""
        if self._joined:
            self._append()
        self._left += rows

    def adopt(self, decodes: Rows, chunks: list[int], rows: Rows) -> bool:
        """Whether `rows`, a batch's decodes and then its chunks, are all rows that run, in their order. If so that array is kept."""
        if rows is self._rows:
            return not (self._joined or self._left or self._is_stale)
        if decodes is not self._rows or chunks != self._joined or self._left or self._is_stale:
            return False
        self._rows, self._joined = rows, []
        return True

    def replace(self, before: Rows, after: Rows) -> bool:
        """Whether exactly `before`, an array that was adopted, are the rows that run; if so, they are `after` from now on."""
        if before is not self._rows or self._joined or self._left or self._is_stale:
            return False
        self._rows = after
        return True

    def array(self, states: Iterable[RequestState]) -> Rows:
        """The rows; `states` iterates the running requests in order, for when the array has to be made anew."""
        if self._is_stale:
            self._rows = np.array([row for state in states for row in state.rows if row >= 0], np.int64)
            self._is_stale = False
            self._joined, self._left, self._num_unknown = [], [], 0
        elif self._left:
            self._mask_out()
        elif self._joined:
            self._append()
        return self._rows

    def _append(self) -> None:
        self._rows = np.concatenate([self._rows, np.array(self._joined, np.int64)])
        self._joined = []

    def _mask_out(self) -> None:
        rows = self._rows
        top = max(max(self._left), int(rows.max()) if len(rows) else 0)
        if top >= len(self._mark):
            self._mark = np.zeros(2 * top + 2, np.bool_)
        mark = self._mark
        mark[self._left] = True
        self._rows = rows[~mark[rows]]
        mark[self._left] = False
        self._left = []
