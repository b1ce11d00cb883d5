"""When a sequence ends: EOS, stop ids, its full length. Knows limits by row. Does not know what happens to it then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import RowColumns, Rows
from scheduler.status import LENGTH, NOT_FINISHED, STOP


def finish_codes(
    columns: RowColumns, rows: Rows, tokens: NDArray[np.int32], totals: NDArray[np.int64]
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Why each row ends after its newest token `tokens[i]` made it `totals[i]` tokens long, int8 [n], 0 if it goes on; and the
    places of those that end, int64 [k]."""
    codes: NDArray[np.int8] = np.zeros(len(rows), np.int8)
    done = (totals >= columns.max_total[rows]).nonzero()[0]
    if len(done):
        codes[done] = LENGTH
    if columns.num_with_stops:
        is_stop = columns.is_stop(rows, tokens) & (totals >= columns.min_total[rows])
        codes[is_stop] = STOP
        done = codes.nonzero()[0]
    return codes, done


def kept_tokens(columns: RowColumns, row: int, tokens: list[int], total: int) -> tuple[int, int]:
    """(how many of several new tokens the row keeps, why it ends after them or 0), when it was `total` tokens long before."""
    if not tokens:
        return 0, NOT_FINISHED
    is_stop = columns.is_stop(np.array([[row]]), np.array([tokens], np.int32))[0].tolist()
    for count in range(1, len(tokens) + 1):
        if is_stop[count - 1] and total + count >= columns.min_total[row]:
            return count, STOP
        if total + count >= columns.max_total[row]:
            return count, LENGTH
    return len(tokens), NOT_FINISHED
