"""When a sequence ends: EOS, stop ids, its full length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

from .request import RequestState
from .rows import RowColumns, Rows
from .status import LENGTH, STOP

_NO_PLACES: NDArray[np.int64] = np.empty(0, np.int64)


def finish_codes(
    columns: RowColumns, rows: Rows, tokens: NDArray[np.int32], totals: NDArray[np.int64]
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return why each row, `totals` long with `tokens`, ends, int8 [n], or 0; and the places of ends, int64 [k]."""
    codes: NDArray[np.int8] = np.zeros(len(rows), np.int8)
    done = _NO_PLACES
    if columns.reach_length(rows, totals):
        done = (totals >= columns.max_total[rows]).nonzero()[0]
        codes[done] = LENGTH
    if columns.num_with_stops:
        is_stop = columns.is_stop(rows, tokens) & (totals >= columns.min_total[rows])
        codes[is_stop] = STOP
        done = codes.nonzero()[0]
    return codes, done


def kept_counts(
    columns: RowColumns,
    rows: Rows,
    given: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]],
    known: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return how many of its new tokens each row keeps, int64 [n], and why it ends after them, int8 [n], or 0. `given`:
    all tokens, the place of each row's first one, and how many it has; `known`: its tokens before."""
    tokens, first, counts = given
    if not columns.num_with_stops and not np.count_nonzero(known + counts >= columns.max_total[rows]):
        # None can end: the usual case with drafts.
        return counts, np.zeros(len(rows), np.int8)
    owners, places = np.arange(len(rows)).repeat(counts), rising_from(first, counts)
    nth = places - first[owners] + 1
    each, done = finish_codes(columns, rows[owners], tokens[places], known[owners] + nth)
    kept, codes = counts.copy(), np.zeros(len(rows), np.int8)
    # A row's first end counts, so it is written last.
    ends = done[::-1]
    kept[owners[ends]], codes[owners[ends]] = nth[ends], each[ends]
    return kept, codes


def kept_of(request: RequestState, sequence: int, tokens: list[int], known: int) -> tuple[int, int]:
    """Return `kept_counts` of one sequence with at least one new token; it may have no row."""
    columns, place = RowColumns(1), np.zeros(1, np.int64)
    columns.bind(0, request, sequence)
    given = np.array(tokens, np.int32), place, np.array([len(tokens)])
    kept, codes = kept_counts(columns, place, given, np.array([known]))
    return kept.item(0), codes.item(0)
