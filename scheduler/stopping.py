"""When a sequence ends: EOS, stop ids, its full length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

from .rows import RowColumns, Rows
from .status import LENGTH, NOT_FINISHED, STOP

_NO_PLACES: NDArray[np.int64] = np.empty(0, np.int64)


def finish_codes(
    columns: RowColumns, rows: Rows, tokens: NDArray[np.int32], totals: NDArray[np.int64]
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Why each row ends after its newest token `tokens[i]` made it `totals[i]` tokens long, int8 [n], 0 if it goes on; and the
    places of those that end, int64 [k]."""
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
    """How many of several new tokens each row keeps, int64 [n], and why it ends after them or 0, int8 [n].

    `given` are all tokens, the place of each row's first one and how many it has; `known` is how long it was before.
    """
    tokens, first, counts = given
    codes: NDArray[np.int8] = np.zeros(len(rows), np.int8)
    room = columns.max_total[rows] - known
    kept = np.minimum(counts, np.maximum(room, 0))
    codes[(counts >= room) & (counts > 0)] = LENGTH
    if columns.num_with_stops:
        owners, places = np.arange(len(rows)).repeat(kept), rising_from(first, kept)
        of_rows, nth = rows[owners], places - first[owners] + 1
        is_stop = columns.is_stop(of_rows, tokens[places]) & (known[owners] + nth >= columns.min_total[of_rows])
        # The first one of a row counts: written last.
        ends = is_stop.nonzero()[0][::-1]
        kept[owners[ends]], codes[owners[ends]] = nth[ends], STOP
    return kept, codes


def kept_of(stops: set[int], limits: tuple[int, int], tokens: list[int], total: int) -> tuple[int, int]:
    """The same for one sequence with these stop ids, which count from the first of `limits` on, and whose full length is the second."""
    least, most = limits
    for count, token in enumerate(tokens, 1):
        if token in stops and total + count >= least:
            return count, STOP
        if total + count >= most:
            return count, LENGTH
    return len(tokens), NOT_FINISHED
