"""The state of each row's block table in an engine, and the changes to send to it.

An engine keeps its own table for each request, which takes two changes: more blocks at its end, or a new table. Our tables
change in other ways, too: an equal block that another row computed replaces a full block, and preemption takes a tail.
Engines reserve their first blocks, so their ids are ours plus a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Due(NamedTuple):
    """Rows of a batch whose tables have to be sent to an engine, by their places in the batch, with the columns to send: `starts` to `stops` − 1, int64
    [n]. `is_wrong`, bool [n]: as a new table, and not at the end of the engine's."""

    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    is_wrong: NDArray[np.bool_]


class EngineTables:
    """Columns over rows, which grow with the rows in batches. first_block: the engine's id of our block 0."""

    def __init__(self, manager: Any, first_block: int) -> None:
        self._manager = manager
        self._first_block = first_block
        # How many blocks of each row the engine has right, int64 [rows]; whether its table is wrong, and whether it has to be sent.
        self._num_sent = np.zeros(0, np.int64)
        self._is_wrong = np.zeros(0, np.bool_)
        self._is_due = np.zeros(0, np.bool_)
        # Prompt tokens of the row's request, int64 [rows]: further known tokens are outputs.
        self._num_prompt = np.zeros(0, np.int64)

    def open(self, row: int, num_prompt: int) -> None:
        """Begin a row for another request, or again for one that had lost it: the engine has nothing of its table."""
        self._hold(row + 1)
        self._num_sent[row], self._num_prompt[row] = 0, num_prompt
        self._is_wrong[row] = self._is_due[row] = True

    def num_prompt(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the prompt tokens of each row, int64 [n]."""
        return self._num_prompt[rows]

    def note(self, batch: Any) -> None:
        """Note the changes of tables since the last batch, also of rows outside of this one."""
        rows, columns = batch.table_rows, batch.table_columns
        if not len(rows):
            return
        self._hold(int(rows.max()) + 1)
        self._is_due[rows] = True
        self._is_wrong[rows[columns < self._num_sent[rows]]] = True

    def mark_wrong(self, rows: NDArray[np.int64]) -> None:
        """Mark the tables of these rows, int64 [n], as wrong in the engine, whatever batches say."""
        self._is_due[rows] = self._is_wrong[rows] = True

    def take_due(self, batch: Any) -> Due | None:
        """Return the rows of the batch whose tables differ from the engine's, and count them as sent; None: there are none."""
        places = self._is_due[batch.rows].nonzero()[0]
        if not len(places):
            return None
        rows = batch.rows[places]
        wrong, stops = self._is_wrong[rows], self._manager.rows.num_blocks[rows]
        starts = np.where(wrong, 0, self._num_sent[rows])
        self._num_sent[rows], self._is_wrong[rows], self._is_due[rows] = stops, False, False
        return Due(places, rows, starts, stops, wrong)

    def changes(self, batch: Any) -> Iterator[tuple[int, list[int], bool]]:
        """Yield each row of the batch whose table differs from the engine's: its place, the engine's ids to put at the end of its table, and whether to
        replace the table by them."""
        due = self.take_due(batch)
        if due is None:
            return
        tables = batch.block_tables
        last = (tables[due.rows, due.stops - 1] + self._first_block).tolist()
        for place, row, start, stop, is_whole, newest in zip(*(column.tolist() for column in due), last):
            # Most rows have one more block.
            ids = [newest] if stop - start == 1 else (tables[row, start:stop] + self._first_block).tolist()
            yield place, ids, is_whole

    def _hold(self, num_rows: int) -> None:
        if num_rows <= len(self._num_sent):
            return
        num_held = max(num_rows, 2 * len(self._num_sent), 64)
        for name in ("_num_sent", "_is_wrong", "_is_due", "_num_prompt"):
            column = getattr(self, name)
            longer = np.zeros(num_held, column.dtype)
            longer[: len(column)] = column
            setattr(self, name, longer)
