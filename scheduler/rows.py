"""The scheduler's columns by row, and when rows end (EOS, stop ids, full length)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import Tokens
from paged.base.growing import rising_from

from .request import LENGTH, STOP, RequestState

Rows = NDArray[np.int64]
"""Indices of rows, [n]."""
Counts = NDArray[np.int64]
"""An integer for each of some rows, [n]."""
NO_ROWS: Rows = np.empty(0, np.int64)

# Stop ids are counted by these bits of theirs.
_STOP_BITS = 2**16 - 1


class RowColumns:
    """Columns by row; they grow with the memory layer's.

    max_total   int64: tokens at which the sequence has its full length, and ends
    prompt_total, expected_total  int64: tokens that are not outputs; all tokens that are expected (0: not known)
    reserved    int64: tokens for which blocks are kept by count, under policies that do so
    owner, id, sequence  object, object, int64: the RequestState, its id, and which sequence of it

    not_sampling  rows whose known tokens were all sampled: computed again, they do not sample
    recovering  rows that compute tokens again, and up to which token: their high-water mark
    """

    def __init__(self, num_rows: int = 64) -> None:
        self._num_rows = num_rows
        numbers = (np.zeros(num_rows, np.int64) for _ in range(5))
        self.max_total, self.prompt_total, self.expected_total, self.reserved, self.sequence = numbers
        self.owner: NDArray[np.object_] = np.empty(num_rows, object)
        self.id: NDArray[np.object_] = np.empty(num_rows, object)
        # How many stop ids of all rows have these bits, and how many there are. A token whose bits none has ends no row;
        # the others, a few, are looked up in the stop ids of their rows.
        self._num_stops, self._num_all_stops = np.zeros(_STOP_BITS + 1, np.int32), 0
        # (version, n): none of the rows of this version has its full length before the first of them has n tokens.
        self._unfilled = -1, 0
        # Rows that serve a sequence, and the sum of their max_total.
        self.num_bound = self.sum_max_total = 0
        self.not_sampling: set[int] = set()
        self.recovering: dict[int, int] = {}

    def bind(self, row: int, state: RequestState, sequence: int) -> None:
        request, max_total = state.request, state.max_total[sequence]
        if row >= self._num_rows:
            self.ensure(row + 1)
        self.num_bound += 1
        self.sum_max_total += max_total
        self.max_total[row] = max_total
        self.prompt_total[row] = before = state.prompt_len + state.appended[sequence]
        self.expected_total[row] = 0 if request.expected_tokens is None else before + request.expected_tokens
        self.owner[row] = state
        self.id[row] = request.id
        self.sequence[row] = sequence
        if state.has_sampled[sequence]:
            self.not_sampling.add(row)
        if state.stops:
            self._count_stops(state, 1)

    def prolong(self, row: int, num_appended: int, max_total: int) -> None:
        """Lengthen the row by `num_appended` tokens from the caller. Its full length is `max_total` now."""
        self.sum_max_total += max_total - self.max_total.item(row)
        self.max_total[row] = max_total
        self.prompt_total[row] += num_appended
        if self.expected_total[row]:
            self.expected_total[row] += num_appended

    def note_sampled(self, request: RequestState, sequence: int, *, has_sampled: bool = True) -> None:
        """Note whether a sequence has nothing to sample until the caller appends tokens; it may have no row."""
        request.set_sampled(sequence, has_sampled)
        row = request.rows[sequence]
        if has_sampled and row >= 0:
            self.not_sampling.add(row)
        else:
            self.not_sampling.discard(row)

    def finish_codes(self, rows: Rows, tokens: Tokens, totals: Counts, version: int = -1) -> NDArray[np.int8]:
        """Return each row's finish code, int8 [n]. `totals` count `tokens`, too. `version`: see `filled`."""
        codes: NDArray[np.int8] = np.zeros(len(rows), np.int8)
        if len(filled := self.filled(rows, totals, version)):
            codes[filled] = LENGTH
        if self._num_all_stops and (stops := self.stops_at(rows, tokens, totals)):
            codes[stops] = STOP
        return codes

    def kept_counts(
        self, rows: Rows, given: tuple[Tokens, Counts, Counts], known: Counts
    ) -> tuple[Counts, NDArray[np.int8]]:
        """Return how many of its new tokens each row keeps, int64 [n], and its finish code then, int8 [n]. `given`: new
        tokens, packed; the place of each row's first one; and how many each has. `known`: tokens of each before."""
        tokens, first, counts = given
        self._unfilled = -1, 0
        if not self._num_all_stops and not np.count_nonzero(known + counts >= self.max_total[rows]):
            # None can end: the usual case with drafts.
            return counts, np.zeros(len(rows), np.int8)
        owners, places = np.arange(len(rows)).repeat(counts), rising_from(first, counts)
        nth = places - first[owners] + 1
        each = self.finish_codes(rows[owners], tokens[places], known[owners] + nth)
        kept, codes = counts.copy(), np.zeros(len(rows), np.int8)
        # A row's first end counts, so it is written last.
        ends = each.nonzero()[0][::-1]
        kept[owners[ends]], codes[owners[ends]] = nth[ends], each[ends]
        return kept, codes

    def filled(self, rows: Rows, totals: Counts, version: int) -> Counts:
        """Return the places of rows that have their full length with `totals` tokens, int64 [k]. `version`: these are
        all running rows, which grow by a token a call (`Running.version`), so it is known when the first ends; or -1."""
        if not len(rows) or (version == self._unfilled[0] >= 0 and totals.item(0) < self._unfilled[1]):
            return NO_ROWS
        left = self.max_total[rows] - totals
        least = left.item(left.argmin())
        self._unfilled = version, totals.item(0) + least
        return (left <= 0).nonzero()[0] if least <= 0 else NO_ROWS

    def release(self, row: int) -> None:
        if (state := self.owner[row]).stops:
            self._count_stops(state, -1)
        self.num_bound -= 1
        self.sum_max_total -= self.max_total.item(row)
        self.owner[row] = self.id[row] = None
        self.not_sampling.discard(row)
        self.recovering.pop(row, None)

    def _count_stops(self, state: RequestState, change: int) -> None:
        for stop in state.stops:
            self._num_stops[stop & _STOP_BITS] += change
        self._num_all_stops += change * len(state.stops)

    def stops_at(self, rows: Rows, tokens: Tokens, totals: Counts) -> list[int]:
        """Return the places of tokens that are stop ids of their rows and count as such in sequences of `totals`."""
        found = []
        for place in self._num_stops[tokens & _STOP_BITS].nonzero()[0].tolist():
            row = rows.item(place)
            state, num_output = self.owner[row], totals.item(place) - self.prompt_total.item(row)
            if tokens.item(place) in state.stops and num_output >= state.request.min_tokens:
                found.append(place)
        return found

    def recover(self, row: int, num_tokens: int) -> None:
        """Note that the row falls back, and that `num_tokens` tokens, or more before, of its sequence were computed."""
        self.recovering[row] = self.owner[row].reach(self.sequence.item(row), num_tokens)

    def ensure(self, num_rows: int) -> None:
        """Make room for so many rows. All columns grow, or none where memory is short (MemoryError)."""
        if num_rows <= self._num_rows:
            return
        larger = RowColumns(max(num_rows, 2 * self._num_rows))
        for name, column in vars(larger).items():
            if isinstance(column, np.ndarray) and name != "_num_stops":
                column[: self._num_rows] = getattr(self, name)
                setattr(self, name, column)
        self._num_rows = larger._num_rows
