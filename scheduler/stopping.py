"""When a sequence ends: EOS, stop ids, its full length. Knows limits by row. Does not know what happens to it then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import RowColumns, Rows
from scheduler.status import LENGTH, NOT_FINISHED, STOP

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
        is_stop = (columns.stops[rows] == tokens[:, None]).any(1) & (totals >= columns.min_total[rows])
        codes[is_stop] = STOP
        done = codes.nonzero()[0]
    return codes, done


def kept_tokens(columns: RowColumns, row: int, tokens: list[int], total: int) -> tuple[int, int]:
    """(how many of several new tokens the row keeps, why it ends after them or 0), when it was `total` tokens long before."""
    stops = set(columns.stops[row].tolist()) if columns.has_stops[row] else set()
    return kept_of(stops, (columns.min_total.item(row), columns.max_total.item(row)), tokens, total)


def kept_of(stops: set[int], limits: tuple[int, int], tokens: list[int], total: int) -> tuple[int, int]:
    """The same for a sequence with these stop ids, which count from the first of `limits` on, and whose full length is the second."""
    least, most = limits
    for count, token in enumerate(tokens, 1):
        if token in stops and total + count >= least:
            return count, STOP
        if total + count >= most:
            return count, LENGTH
    return len(tokens), NOT_FINISHED
