"""How block tables grow and shrink, and what changed in them since the last batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

from .copies import Copies
from .layout import Layout
from .pool import Pool
from .runs import DEVICE, NO_BLOCKS, NUM_PLACES, Blocks
from .tables import Rows, Tables


class TableChanges(NamedTuple):
    """Changed entries of the full group's block tables: `blocks[i]` is now at (`rows[i]`, `columns[i]`)."""

    rows: Rows
    columns: NDArray[np.int64]
    blocks: NDArray[np.int32]


NO_CHANGES = TableChanges(NO_BLOCKS, NO_BLOCKS, np.empty(0, np.int32))


class Growth:
    """Draws and releases blocks of rows. `pools`: by place. `blocks` is the full group's on the device; `device`, that
    of pages, is another one if blocks of the full group cost no page."""

    def __init__(self, tables: Tables, pools: Sequence[Pool], layout: Layout) -> None:
        self.tables, self.layout, self.copies, self._pools = tables, layout, Copies(pools), pools
        self.blocks, self.device = pools[DEVICE], pools[DEVICE - NUM_PLACES]
        # None until the first `take_changes`.
        self._changed: list[TableChanges] | None = None
        # Set by a fork. Only then does a step check rows for a shared partial block.
        self.any_shared_tail = False
        # Rows and columns of promised blocks, which are drawn together and take `num_promised` pages.
        self._promised: list[tuple[Rows, NDArray[np.int64]]] = []
        self.num_promised = 0
        # Content of the full group that rows hold at promised columns: (row, first column, blocks).
        self._found: list[tuple[int, int, Blocks]] = []

    def write(self, row: int, column: int, blocks: Blocks) -> None:
        """Write `blocks` into the row's table from `column` on. The table grows if they reach past its end."""
        tables, stop = self.tables, column + len(blocks)
        tables.ensure_columns(stop)
        if self._changed is not None:
            # Before anything is written: this may raise MemoryError.
            rows, columns = np.array([row]).repeat(len(blocks)), np.arange(column, stop)
            self._changed.append(TableChanges(rows, columns, blocks.astype(np.int32)))
        tables.blocks[0, row, column:stop] = blocks
        if stop >= tables.num_blocks[row]:
            tables.num_blocks[row] = stop
            tables.slot_base[row] = (int(blocks[-1]) - stop + 1) * tables.block_size

    def promise(self, rows: Rows, have: NDArray[np.int64], wanted: NDArray[np.int64] | None = None) -> None:
        """Promise each row blocks for columns `have` to `wanted` - 1 (None: one block); `have` is the end of its table.
        The next `draw_promised` draws them. Raises OutOfBlocks, changing nothing."""
        total = len(rows)
        if wanted is not None:
            counts = wanted - have
            total = int(counts.sum())
        pages = total * self.layout.block_pages
        if self.layout.states:
            pages += int(np.count_nonzero(have == 0)) * self.layout.state_pages
        self.device.require(self.num_promised + pages)
        if wanted is not None:
            # Before anything is promised: this may raise MemoryError.
            self.tables.ensure_columns(int(wanted.max()))
            rows, have = rows.repeat(counts), rising_from(have, counts)
        self._promised.append((rows, have))
        self.num_promised += pages

    def promise_one(self, row: int, have: int, wanted: int) -> None:
        """`promise` for one row. Its table need not have the columns: `draw_promised` adds them."""
        pages = (wanted - have) * self.layout.block_pages + (0 if have else self.layout.state_pages)
        self.device.require(self.num_promised + pages)
        self._promised.append((np.array([row]).repeat(wanted - have), np.arange(have, wanted)))
        self.num_promised += pages

    def hold_promised(self, row: int, column: int, blocks: Blocks) -> None:
        """Hold content of the full group at promised columns of the row, from `column` on: nothing is drawn there."""
        self.blocks.hold(blocks)
        self.num_promised -= len(blocks) * self.layout.full_pages
        self._found.append((row, column, blocks))

    def lacking(
        self, rows: Rows, ends: NDArray[np.int64], have: NDArray[np.int64] | None = None, *, at_once: bool = True
    ) -> NDArray[np.int64]:
        """Pages that each row draws to hold its first `ends` tokens, int64 [n]. `have`: blocks that it has (None: now).
        Not `at_once`: step by step; windows give back what they pass, and still draw a block."""
        tables, layout = self.tables, self.layout
        wanted, have = -(-ends // tables.block_size), tables.num_blocks[rows] if have is None else have
        short: NDArray[np.int64] = np.maximum(wanted - have, 0)
        if layout.is_plain:
            return short
        pages: NDArray[np.int64] = short * (layout.block_pages if at_once else layout.full_pages)
        for side in () if at_once else layout.bounded:
            # The front of a row on the host may lie behind `have`.
            lacks = np.minimum(wanted, side.most) - np.maximum(have - tables.first[side.table, rows], 0)
            pages += np.maximum(lacks, np.minimum(short, 1)) * side.pages
        # A row whose states must not be overwritten draws others.
        draws_states = ((have == 0) & (short > 0)) | self.moving_states(rows)
        pages += draws_states * np.int64(layout.state_pages)
        return pages

    def owed(self, rows: Rows, totals: NDArray[np.int64], have: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """`lacking` for rows that will have `totals` tokens at last, step by step."""
        return self.lacking(rows, totals, have, at_once=False)

    def moving_states(self, rows: Rows) -> NDArray[np.bool_]:
        """Return, bool [n], which rows' next shares write states elsewhere: others hold them, or they are content."""
        tables, device = self.tables, self.device
        moves: NDArray[np.bool_] = tables.moves_state[rows] & (tables.num_blocks[rows] > 0)
        for i in moves.nonzero()[0].tolist():
            blocks = [tables.blocks.item(side.table, rows[i], 0) for side in self.layout.states]
            if not any(device.refs(block) > 1 or device.has_content(block) for block in blocks):
                # No other row holds them now: clear the mark.
                tables.let_move(rows[i], False)
                moves[i] = False
        return moves

    @property
    def num_unpromised(self) -> int:
        return self.device.num_available - self.num_promised

    def evict_promised(self) -> None:
        """Draw the promised blocks now if that evicts something, so that no lookup finds what goes."""
        if self.num_promised > self.device.num_free:
            self.draw_promised()

    def draw_promised(self) -> None:
        """Draw all promised blocks and write them into the tables: one draw, one eviction, one write."""
        tables, layout = self.tables, self.layout
        if not self._promised:
            return
        rows, columns = self._promised[0] if len(self._promised) == 1 else map(np.concatenate, zip(*self._promised))
        total = len(rows)
        if layout.sides:
            self.device.make_room(self.num_promised)
        num_found = sum([len(found) for _, _, found in self._found])
        blocks = drawn = self.blocks.draw(total - num_found, layout.full_pages or 1)
        if num_found:
            # Found blocks at their columns, drawn ones at the others, in order.
            blocks = np.full(total, -1)
            for row, first, found in self._found:
                blocks[(rows == row) & (columns >= first) & (columns < first + len(found))] = found
            blocks[blocks < 0] = drawn
        try:
            entries = blocks.astype(np.int32)
            try:
                tables.blocks[0][rows, columns] = entries
            except IndexError:
                # Cheaper than a check each time: numpy checks all indices before it writes.
                tables.ensure_columns(int(columns.max()) + 1)
                tables.blocks[0, rows, columns] = entries
        except MemoryError:
            self.blocks.release(drawn)
            raise
        self._promised, self._found, self.num_promised = [], [], 0
        for side in layout.sides:
            if not side.is_state:
                tables.put(side.table, rows, columns, self.device.draw(total, side.pages))
            elif len(begins := rows[columns == 0]):
                tables.put(side.table, begins, 0, self.device.draw(len(begins), side.pages))
        # For a row with several columns numpy keeps the last value.
        tables.num_blocks[rows] = columns + 1
        tables.slot_base[rows] = (blocks - columns) * tables.block_size
        if self._changed is not None:
            self._changed.append(TableChanges(rows, columns, entries))

    def give_back(self, row: int, keep: int) -> None:
        """Release the row's blocks from column `keep` on, tail first."""
        tables = self.tables
        num_blocks = int(tables.num_blocks[row])
        if keep < num_blocks:
            self.blocks.release(tables.blocks[0, row, keep:num_blocks])
            if self.layout.sides:
                self.give_back_sides(row, keep)
            tables.set_num_blocks(row, keep)

    def give_back_sides(self, row: int, keep: int) -> None:
        """Release what the row's sides hold from column `keep` on, tail first, states with block 0; drop its copies."""
        self.copies.drop(row)
        tables, stop = self.tables, int(self.tables.num_blocks[row])
        for side in self.layout.sides:
            first = max(keep, int(tables.first[side.table, row]))
            last = min(stop, 1) if side.is_state else stop
            if first < last:
                self.device.release(tables.blocks[side.table, row, first:last])
            if not side.is_state:
                tables.set_first(side.table, row, min(int(tables.first[side.table, row]), keep))

    def is_restart(self, row: int, num_tokens: int) -> bool:
        """Whether the row can stand at `num_tokens` launched tokens: windows reach back, states are of that length."""
        tables, layout = self.tables, self.layout
        if not num_tokens or not layout.sides:
            return True
        if layout.states and num_tokens < tables.num_launched[row]:
            return False
        return all(side.first_column(num_tokens) >= tables.first[side.table, row] for side in layout.bounded)

    def restarts(self, row: int) -> tuple[int, int]:
        """The fewest (above 0) and the most tokens at which the row can stand. It can stand at all lengths between."""
        launched = self.tables.num_launched.item(row)
        stands_from = bisect_left(range(1, launched + 1), True, key=lambda length: self.is_restart(row, length))
        return min(stands_from + 1, launched), launched

    def mark_tail(self, row: int, is_shared: bool) -> None:
        """Mark whether the row's partial block may be shared. If so, it is checked before the row writes there."""
        self.tables.shares_tail[row] = is_shared
        self.any_shared_tail = is_shared or bool(self.tables.shares_tail.any())

    def note_shared_tail(self, row: int) -> None:
        """Mark the row if its last block is partial and shared now. Before, it was full or on the host."""
        tables = self.tables
        column, offset = divmod(tables.num_launched.item(row), tables.block_size)
        if offset and column < tables.num_blocks[row] and self.blocks.refs(tables.blocks.item(0, row, column)) > 1:
            self.mark_tail(row, True)

    def copy_shared_tails(self, rows: Rows, num_grown: int) -> None:
        """Copy each partial block that one of these rows is about to write, if it is content or others hold it. Its
        last holder writes in place. Raises OutOfBlocks, changing nothing, without `num_grown` more pages available."""
        tables = self.tables
        writers = [
            row for row in rows[tables.shares_tail[rows]].tolist() if tables.num_launched[row] % tables.block_size
        ]
        parts = [(place, pages, self._tails_to_copy(place, writers)) for _, place, pages in self.layout.of_blocks]
        self.device.require(sum(pages * len(tails) for _, pages, tails in parts) + num_grown)
        for place, pages, tails in parts:
            pool = self._pools[place]
            for (row, column, block), copy in zip(tails, pool.draw(len(tails), pages or 1).tolist(), strict=True):
                if pool.refs(block) > 1:
                    pool.release(np.array([block]))
                else:
                    self.copies.take_over(place, np.array([block]))
                self._put_copy(place, row, column, block, copy, pages)
        tables.shares_tail[writers] = False
        self.any_shared_tail = bool(tables.shares_tail.any())

    def copy_into(self, place: int, row: int, column: int, block: int, pages: int) -> None:
        """Copy a held block of a place, of so many pages, into a new one, which the row gets at this column."""
        copy = self._pools[place].draw(1, pages or 1).item()
        self._put_copy(place, row, column, block, copy, pages)

    def _put_copy(self, place: int, row: int, column: int, block: int, copy: int, pages: int) -> None:
        if place == DEVICE:
            self.write(row, column, np.array([copy]))
        else:
            self.tables.put(place // NUM_PLACES, row, column, copy)
        self.copies.plan_within(row, place, block, copy, pages)

    def _tails_to_copy(self, place: int, writers: list[int]) -> list[tuple[int, int, int]]:
        """(row, column, block) of each partial block that its writer must copy. The last holder of a block need not."""
        pool, tails, holders = self._pools[place], list[tuple[int, int, int]](), dict[int, int]()
        for row in writers:
            column = int(self.tables.num_launched[row]) // self.tables.block_size
            block = int(self.tables.blocks[place // NUM_PLACES, row, column])
            left = holders.setdefault(block, pool.refs(block))
            if left > 1 or pool.has_content(block):
                holders[block] = left - 1
                tails.append((row, column, block))
        return tails

    def share_sides(self, row: int, child: int, num_blocks: int) -> None:
        """Let a fork hold what the row's sides hold before column `num_blocks`. Who writes a state first, moves it."""
        tables = self.tables
        for side in self.layout.sides:
            first, stop = int(tables.first[side.table, row]), min(num_blocks, 1) if side.is_state else num_blocks
            blocks = tables.blocks[side.table, row, first:stop].astype(np.int64)
            self.device.hold(blocks)
            tables.put(side.table, child, slice(first, stop), blocks)
            tables.set_first(side.table, child, first)
        if self.layout.states and num_blocks:
            tables.let_move([row, child], True)

    def take_changes(self) -> TableChanges:
        """Return the table entries changed since the last call, in order, read-only. The first call begins a record."""
        parts, self._changed = self._changed, []
        if not parts:
            return NO_CHANGES
        changes = parts[0] if len(parts) == 1 else TableChanges(*map(np.concatenate, zip(*parts)))
        for column in changes:
            column.setflags(write=False)
        return changes

    @property
    def changed_rows(self) -> set[int]:
        """Rows whose tables changed since the last `take_changes`."""
        return {row for change in self._changed or () for row in change.rows.tolist()}

    def put_back_changes(self, rows: Rows, columns: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """Put back the changes of a batch that does not run. The next `take_changes` returns them first."""
        if len(rows):
            self._changed = [TableChanges(rows, columns, blocks), *(self._changed or ())]
