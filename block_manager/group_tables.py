"""What a forward pass needs of each layer group: the pages of its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising

from .flights import Flight
from .layout import Layout
from .pool import Pool
from .tables import Rows, Tables


class GroupTables:
    """The pages of n rows in one layer group; read when asked for, as the tables stand then.

    tables  int32 [n, columns, pages]: of each block; -1 in columns that a window or chunk gave back, and behind a table.
            A state has one column
    read    int32 [n, pages], of states: where each row's state before its first token of the batch lies; -1: at zero
    write   int32 [n, pages], of states: where the state after its last token of the batch goes
    """

    def __init__(
        self,
        tables: Tables,
        device: Pool,
        layout: Layout,
        group: int,
        rows: Rows,
        flight: Flight | None = None,
    ) -> None:
        self._tables, self._device, self._group = tables, device, layout.groups[group]
        self._table, self._rows = layout.table_of[group], rows
        # Forks may join the flight's arrays later.
        self._flight, self._starts = flight, None if flight is None else flight.starts
        # Of a state: its place among the blocks that a batch reads elsewhere.
        self._place = layout.place_of.get(self._table, 0)

    @property
    def tables(self) -> NDArray[np.int32]:
        tables, rows = self._tables, self._rows
        width = 1 if self._group.kind == "state" else int(tables.num_blocks[rows].max(initial=0))
        return self._pages(tables.blocks[self._table, rows, :width], rows[:, None], rising(width))

    def at(self, rows: Rows, columns: Rows) -> NDArray[np.int32]:
        """Of rows, int64 [m], the pages of the block that each has in a column, int64 [m]: int32 [m, pages], -1 as in `tables`."""
        return self._pages(self._tables.blocks[self._table, rows, columns], rows, columns)

    def _pages(self, blocks: NDArray[np.int32], rows: Rows, columns: Rows) -> NDArray[np.int32]:
        tables = self._tables
        is_there = (columns >= tables.first[self._table, rows]) & (columns < tables.num_blocks[rows])
        return self._device.pages_of(np.where(is_there, blocks, -1), self._group.pages)

    @property
    def write(self) -> NDArray[np.int32]:
        pages: NDArray[np.int32] = self.tables[:, 0]
        return pages

    @property
    def read(self) -> NDArray[np.int32]:
        assert self._flight is not None and self._starts is not None, "states are read by a batch"
        pages: NDArray[np.int32] = np.where(self._starts[:, None] == 0, np.int32(-1), self.write)
        for row, read in self._flight.reads.items():
            block = np.array([read.blocks[self._place]])
            pages[self._rows == row] = self._device.pages_of(block, self._group.pages)
        return pages
