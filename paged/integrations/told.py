"""What an engine knows of each row's block table, and what it has to learn next.

An engine keeps a table of its own for each request, and it takes two changes: more blocks behind it, or another table in its
place. Ours change in other ways, too: a full block is switched for an equal one that another row computed, a tail is given to
a row that needs it more. Engines keep their first blocks for themselves, so that their ids are ours and some more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Due(NamedTuple):
    """Rows of a batch whose tables have to be sent to an engine: their places in it, and from which column on to which. `is_wrong`: in the
    place of what it has. int64 [n] and bool [n]."""

    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    is_wrong: NDArray[np.bool_]


class ToldTables:
    """Columns over rows; they grow with the rows that batches name. first_block: what the engine calls our block 0."""

    def __init__(self, manager: Any, first_block: int) -> None:
        self._manager = manager
        self._first_block = first_block
        # How many blocks of each row the engine has right, int64 [rows]; whether its table is wrong before that, and whether it has to be sent.
        self._num_told = np.zeros(0, np.int64)
        self._is_wrong = np.zeros(0, np.bool_)
        self._is_due = np.zeros(0, np.bool_)
        # Prompt tokens of whom it serves, int64 [rows]: what is known beyond them are outputs.
        self._num_prompt = np.zeros(0, np.int64)

    def open(self, row: int, num_prompt: int) -> None:
        """The row serves another request, or one again that had lost it: the engine knows nothing of it."""
        self._hold(row + 1)
        self._num_told[row], self._is_wrong[row], self._is_due[row], self._num_prompt[row] = (
            0,
            True,
            True,
            num_prompt,
        )

    def num_prompt(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Prompt tokens of each row, int64 [n]."""
        return self._num_prompt[rows]

    def note(self, batch: Any) -> None:
        """Take in what changed since the last batch, whosever rows it is about."""
        rows, columns = batch.table_rows, batch.table_columns
        if not len(rows):
            return
        self._hold(int(rows.max()) + 1)
        self._is_due[rows] = True
        self._is_wrong[rows[columns < self._num_told[rows]]] = True

    def mark_wrong(self, rows: NDArray[np.int64]) -> None:
        """These rows, int64 [n], have another table, whatever batches say of it."""
        self._is_due[rows] = self._is_wrong[rows] = True

    def take_due(self, batch: Any) -> Due | None:
        """The rows of the batch whose tables are not what the engine has, from now on taken as sent; None: there are none."""
        places = self._is_due[batch.rows].nonzero()[0]
        if not len(places):
            return None
        rows = batch.rows[places]
        wrong, stops = self._is_wrong[rows], self._manager.rows.num_blocks[rows]
        starts = np.where(wrong, 0, self._num_told[rows])
        self._num_told[rows], self._is_wrong[rows], self._is_due[rows] = stops, False, False
        return Due(places, rows, starts, stops, wrong)

    def tell(self, batch: Any) -> Iterator[tuple[int, list[int], bool]]:
        """Of each row of the batch whose table is not what the engine has: its place, the ids, as the engine counts them, that it has to
        put behind that row's table, and whether to put them in its place."""
        due = self.take_due(batch)
        if due is None:
            return
        tables = batch.block_tables
        last = (tables[due.rows, due.stops - 1] + self._first_block).tolist()
        for place, row, start, stop, is_whole, newest in zip(*(column.tolist() for column in due), last):
            # Most have one more.
            yield (
                place,
                [newest] if stop - start == 1 else (tables[row, start:stop] + self._first_block).tolist(),
                is_whole,
            )

    def _hold(self, num_rows: int) -> None:
        if num_rows <= len(self._num_told):
            return
        num_held = max(num_rows, 2 * len(self._num_told), 64)
        for name in ("_num_told", "_is_wrong", "_is_due", "_num_prompt"):
            column = getattr(self, name)
            longer = np.zeros(num_held, column.dtype)
            longer[: len(column)] = column
            setattr(self, name, longer)
