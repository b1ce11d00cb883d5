"""How block tables grow and shrink, and what changed in them since the last batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising, rising_from
from paged.errors import OutOfBlocks

from .moves import Moves, pairs_of
from .pool import Pool
from .runs import Blocks
from .tables import Rows, Tables


class TableChanges(NamedTuple):
    """Entries of the block tables that changed: `blocks[i]` is now at (`rows[i]`, `columns[i]`)."""

    rows: Rows
    columns: NDArray[np.int64]
    blocks: NDArray[np.int32]


_NO_ROWS: Rows = np.empty(0, np.int64)
NO_CHANGES = TableChanges(_NO_ROWS, _NO_ROWS, np.empty(0, np.int32))


class Growth:
    """Draws blocks into tables and gives them back."""

    def __init__(self, tables: Tables, device: Pool) -> None:
        self._tables = tables
        self._device = device
        # What has changed, in buffers that only grow; the first `_num_changes` entries of each.
        self._changes = TableChanges(np.empty(256, np.int64), np.empty(256, np.int64), np.empty(256, np.int32))
        self._num_changes = 0
        # Instead of these, where one draw is all that has changed.
        self._drawn: TableChanges | None = None
        # Whether any row may share its partial block: only after a fork, so that a step need not look.
        self.any_shared_tail = False
        # Blocks that tables are to get in one draw: each (rows, their columns, how many of both), columns of one row rising, or (row,
        # first column, how many blocks). In all `num_promised`.
        self._promised: list[tuple[Any, Any, int]] = []
        self.num_promised = 0
        # Changes are noted from the first call of take_changes on.
        self._is_watched = False
        # Sources of this batch's copies that no row holds: not to be drawn again before the batch's moves are made.
        self._copied: list[Blocks] = []

    def write(self, row: int, column: int, blocks: Blocks) -> None:
        """Put `blocks` into the row's table from `column` on, which becomes its end if it was before."""
        tables, stop = self._tables, column + len(blocks)
        if stop > tables.blocks.shape[2]:
            tables.ensure_columns(stop)
        tables.blocks[0, row, column:stop] = blocks
        if stop >= tables.num_blocks[row]:
            tables.num_blocks[row] = stop
            tables.slot_base[row] = (int(blocks[-1]) - stop + 1) * tables.block_size
        if self._is_watched:
            self._note(row, rising(stop)[column:], blocks)

    def draw(self, rows: Rows, have: NDArray[np.int64], wanted: NDArray[np.int64]) -> None:
        """Draw blocks so that each of these rows has `wanted` instead of `have`. Raises OutOfBlocks, changing nothing."""
        if len(rows) == 1:
            self.draw_for(rows.item(0), have.item(0), wanted.item(0))
            return
        counts = wanted - have
        total = int(counts.sum())
        self._device.require(self.num_promised + total)
        # Before anything is promised: there may be no memory for the table.
        self._tables.ensure_columns(int(wanted.max()))
        self.promise(rows.repeat(counts), rising_from(have, counts), total)
        self.draw_promised()

    def draw_for(self, row: int, have: int, wanted: int) -> None:
        """`draw` for one row."""
        self._device.require(self.num_promised + wanted - have)
        self._tables.ensure_columns(wanted)
        self.promise(row, have, wanted - have)
        self.draw_promised()

    def promise_one_each(self, rows: Rows, columns: NDArray[np.int64]) -> None:
        """Each of these rows, whose tables end before `columns`, gets a block by the next `draw_promised`.

        Raises OutOfBlocks, changing nothing.
        """
        self._device.require(self.num_promised + len(rows))
        self.promise(rows, columns, len(rows))

    def promise(self, rows: Rows | int, columns: NDArray[np.int64] | int, count: int) -> None:
        """The row, whose table ends before column `columns`, gets so many blocks by the next `draw_promised`, or each of these places
        one, rising in a row; they are there."""
        self._promised.append((rows, columns, count))
        self.num_promised += count

    def evict_promised(self) -> None:
        """Evict what the next draw would, if anything, by drawing now: before content is looked up."""
        if self.num_promised > self._device.num_free:
            self.draw_promised()

    def draw_promised(self) -> None:
        """One draw, with it one eviction, and one write into the tables for all that was promised."""
        tables, promised, total = self._tables, self._promised, self.num_promised
        if not total:
            return
        entry_rows, entry_columns, _ = promised[0]
        if len(promised) == 1 and isinstance(entry_rows, int):
            # As a prompt comes alone: a slice is written faster than places.
            tables.ensure_columns(entry_columns + total)
            blocks = self._device.draw(total)
            self._promised, self.num_promised = [], 0
            self.write(entry_rows, entry_columns, blocks)
            return
        if len(promised) > 1:
            entry_rows, entry_columns = self._entries(promised, total)
        blocks = self._device.draw(total)
        try:
            self._put(entry_rows, entry_columns, blocks)
        except MemoryError:
            self._device.release(blocks[::-1].copy())
            raise
        self._promised, self.num_promised = [], 0
        if self._is_watched:
            if self._num_changes or self._drawn is not None:
                self._note(entry_rows, entry_columns, blocks)
            else:
                self._drawn = TableChanges(entry_rows, entry_columns, blocks.astype(np.int32))
        stop = 0
        for rows, columns, count in promised:
            first, stop = stop, stop + count
            if isinstance(rows, int):
                tables.num_blocks[rows] = end = columns + count
                tables.slot_base[rows] = (blocks.item(stop - 1) - end + 1) * tables.block_size
            else:
                # Of a row that gets several the last one stays.
                tables.num_blocks[rows] = columns + 1
                tables.slot_base[rows] = (blocks[first:stop] - columns) * tables.block_size

    def _entries(self, promised: list[tuple[Any, Any, int]], total: int) -> tuple[Rows, NDArray[np.int64]]:
        """The rows and columns of `total` blocks that were promised, int64 [total] each."""
        rows, columns = np.empty(total, np.int64), np.empty(total, np.int64)
        stop = 0
        for row, column, count in promised:
            first, stop = stop, stop + count
            rows[first:stop] = row
            columns[first:stop] = rising(column + count)[column:] if isinstance(row, int) else column
        return rows, columns

    def _put(self, rows: Rows, columns: NDArray[np.int64], blocks: Blocks) -> None:
        tables = self._tables
        try:
            tables.blocks[0, rows, columns] = blocks
        except IndexError:
            # Dearer to ask each time than to be told once: numpy looks at every index before it writes.
            tables.ensure_columns(int(columns.max()) + 1)
            tables.blocks[0, rows, columns] = blocks

    def note(self, row: int, first: int) -> None:
        """The row's table has grown from column `first` on."""
        tables = self._tables
        stop = int(tables.num_blocks[row])
        if self._is_watched:
            self._note(row, rising(stop)[first:], tables.blocks[0, row, first:stop])

    def give_back(self, row: int, keep: int) -> None:
        """The row's blocks from column `keep` on go back to the pool, tail first."""
        tables = self._tables
        num_blocks = int(tables.num_blocks[row])
        if keep < num_blocks:
            self.release(row, keep, num_blocks)
            tables.set_num_blocks(row, keep)

    def release(self, row: int, first: int, stop: int) -> None:
        """The pool gets the blocks at the row's columns `first` to `stop` - 1 back, tail first; the table still names them."""
        if stop - first == 1:
            self._device.release_one(self._tables.blocks.item(0, row, first))
        elif first < stop:
            self._device.release(self._tables.blocks[0, row, first:stop][::-1].astype(np.int64))

    def copy_shared_tails(self, rows: Rows, num_grown: int) -> Moves:
        """Rows about to write a partial block that others hold, or that became content meanwhile, get a copy of their own; else the
        last holder writes in place.

        Raises OutOfBlocks when the copies and `num_grown` more blocks cannot be had, changing nothing.
        """
        tables, device = self._tables, self._device
        sharing: list[tuple[int, int, int]] = []
        copies = 0
        holders: dict[int, int] = {}
        for row in rows[tables.shares_tail[rows]].tolist():
            column, offset = divmod(int(tables.num_launched[row]), tables.block_size)
            if offset:
                block = int(tables.blocks[0, row, column])
                left = holders.setdefault(block, device.num_refs(block))
                sharing.append((row, column, block))
                if left > 1 or device.is_content(block):
                    holders[block] = left - 1
                    copies += 1
        if copies + num_grown > device.num_available:
            raise OutOfBlocks(copies + num_grown, device.num_available)
        pairs: list[tuple[int, int]] = []
        for row, column, block in sharing:
            tables.shares_tail[row] = False
            is_shared, source = device.num_refs(block) > 1, np.array([block])
            if is_shared or device.is_content(block):
                copy = device.draw(1)
                pairs.append((block, int(copy[0])))
                if is_shared:
                    device.release(source)
                else:
                    self._copied.append(source)
                self.write(row, column, copy)
        self.any_shared_tail = bool(tables.shares_tail.any())
        return Moves(device_to_device=pairs_of(pairs))

    def release_copied(self) -> None:
        """The batch is composed: what it copies from may be drawn for the next one."""
        for block in self._copied:
            self._device.release(block)
        self._copied = []

    def copied(self) -> list[int]:
        """Blocks that only a copy of this batch holds; for the checker."""
        return [block.item(0) for block in self._copied]

    def take_changes(self) -> TableChanges:
        """Every entry of a block table that changed since the last call, in order, read-only; nothing is noted before the first one."""
        changes = self._taken()
        for column in changes:
            # A batch that does not run gives them back as they are.
            column.flags.writeable = False
        return changes

    def _taken(self) -> TableChanges:
        count, self._num_changes, self._is_watched = self._num_changes, 0, True
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            return drawn
        if not count:
            return NO_CHANGES
        rows, columns, blocks = self._changes
        return TableChanges(rows[:count].copy(), columns[:count].copy(), blocks[:count].copy())

    @property
    def changed_rows(self) -> Rows:
        """Rows of tables that changed since the last `take_changes`, each as often as it did."""
        if self._drawn is not None:
            return self._drawn.rows
        return self._changes.rows[: self._num_changes]

    def put_back_changes(self, rows: Rows, columns: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """Changes that were taken for a batch that does not run: the next `take_changes` brings them first."""
        if not len(rows):
            return
        later = self.take_changes()
        self._note(rows, columns, blocks)
        if len(later.rows):
            self._note(*later)

    def _note(self, rows: Rows | int, columns: NDArray[np.int64], blocks: NDArray[Any]) -> None:
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            self._note(*drawn)
        start = self._num_changes
        stop = start + len(blocks)
        changes = self._changes
        if stop > len(changes.rows):
            more = 2 * stop
            self._changes = changes = TableChanges(
                np.resize(changes.rows, more), np.resize(changes.columns, more), np.resize(changes.blocks, more)
            )
        changes.rows[start:stop] = rows
        changes.columns[start:stop] = columns
        changes.blocks[start:stop] = blocks
        self._num_changes = stop
