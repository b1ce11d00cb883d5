"""What take_changes tells, to the entry. That whoever replays it has the block tables, whatever was called, the scheduler's state machine
holds: its shadow runs on tables that it keeps from the batches' changes alone."""

from __future__ import annotations

import numpy as np

from paged.block_manager import BlockManager


class Mirror:
    """A copy of a manager's block tables that knows of them by their changes only."""

    def __init__(self, manager: BlockManager, num_columns: int = 64) -> None:
        self.manager = manager
        self.tables = np.full((64, num_columns), -1, np.int64)
        manager._memory.growth.take_changes()

    def follow(self) -> list[tuple[int, int, int]]:
        """Replay what changed, and return it as (row, column, block)."""
        changes = [array.tolist() for array in self.manager._memory.growth.take_changes()]
        told = list(zip(*changes, strict=True))
        for row, column, block in told:
            self.tables[row, column] = block
        return told

    def differing_rows(self) -> list[int]:
        manager = self.manager
        return [
            row
            for row in manager.live_rows.tolist()
            if self.tables[row, : manager.num_table_blocks[row]].tolist() != manager.table(row).tolist()
        ]


def compute(manager: BlockManager, *rows: int) -> None:
    manager.allocate(rows, [int(manager.num_tokens[row] - manager.num_computed[row]) for row in rows])
    manager.confirm()


def test_nothing_is_noted_before_the_first_call():
    manager = BlockManager(4, 2)
    compute(manager, manager.add([1, 2, 3]))
    assert [len(array) for array in manager._memory.growth.take_changes()] == [0, 0, 0]


def test_each_change_is_told_once_by_row_and_nothing_else_is():
    manager = BlockManager(10, 2, host_blocks=4)
    mirror = Mirror(manager)
    compute(manager, manager.add([1, 2, 3]), manager.add([4, 5, 6]))
    assert (mirror.follow(), mirror.follow()) == ([(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)], [])
    # A hit, a fork, the copy of the partial block that both share, and a row that comes back from the host.
    manager.add([1, 2, 4])
    assert mirror.follow() == [(2, 0, 0)]
    manager.fork(0)
    assert mirror.follow() == [(3, 0, 0), (3, 1, 1)]
    manager.append(0, [4])
    compute(manager, 0)
    assert mirror.follow() == [(0, 1, 4)]
    manager.swap_out([1], 1)
    manager.swap_in([1])
    assert mirror.follow() == [(1, 1, manager.table(1)[1])]


def test_a_duplicate_that_is_given_back_is_told():
    manager = BlockManager(10, 2)
    mirror = Mirror(manager)
    manager.allocate([manager.add([1, 2, 3]), manager.add([1, 2, 4])], [3, 3])
    mirror.follow()
    manager.confirm()
    assert mirror.follow() == [(1, 0, 0)]


def test_tables_that_outgrow_their_first_room_are_told_whole():
    manager = BlockManager(200, 1)
    mirror = Mirror(manager, num_columns=200)
    rows = manager.add([1] * 60), manager.add([2] * 100)
    compute(manager, *rows)
    for row in rows:
        manager.append(row, [3] * 10)
    compute(manager, rows[1])
    compute(manager, rows[0])
    mirror.follow()
    assert mirror.differing_rows() == []


def test_single_blocks_beyond_the_first_room_are_told():
    manager = BlockManager(200, 1)
    mirror = Mirror(manager, num_columns=200)
    rows = manager.add([1] * 64), manager.add([2] * 64)
    compute(manager, *rows)
    for row in rows:
        manager.append(row, [3])
    computed = manager.num_computed[list(rows)]
    manager._memory.place_decodes(np.array(rows), computed, computed + 1)
    manager._memory.draw_promised()
    mirror.follow()
    assert mirror.differing_rows() == []
