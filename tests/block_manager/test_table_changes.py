"""What take_changes tells: whoever replays it onto a copy of the block tables has the block tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.block_manager import BlockManager
from paged.errors import PagedError


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
            for row in manager.rows.live.tolist()
            if self.tables[row, : manager.rows.num_blocks[row]].tolist() != manager.table(row).tolist()
        ]


def compute(manager: BlockManager, *rows: int) -> None:
    manager.allocate(rows, [int(manager.rows.num_tokens[row] - manager.rows.num_computed[row]) for row in rows])
    manager.confirm()


@pytest.fixture
def mirror():
    """Ten blocks of two tokens, four on the host, and somebody who has asked for changes once."""
    return Mirror(BlockManager(10, 2, host_blocks=4))


def test_nothing_is_noted_before_the_first_call():
    manager = BlockManager(4, 2)
    compute(manager, manager.add([1, 2, 3]))
    assert [len(array) for array in manager._memory.growth.take_changes()] == [0, 0, 0]


def test_what_is_told_once_is_not_told_again(mirror):
    compute(mirror.manager, mirror.manager.add([1, 2, 3]))
    assert (mirror.follow(), mirror.follow()) == ([(0, 0, 0), (0, 1, 1)], [])


def test_blocks_of_several_rows_are_told_by_row(mirror):
    manager = mirror.manager
    compute(manager, manager.add([1, 2, 3]), manager.add([4, 5, 6]))
    assert mirror.follow() == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def test_a_hit_is_told(mirror):
    compute(mirror.manager, mirror.manager.add([1, 2, 3]))
    mirror.follow()
    mirror.manager.add([1, 2, 4])
    assert mirror.follow() == [(1, 0, 0)]


def test_a_fork_is_told(mirror):
    row = mirror.manager.add([1, 2, 3])
    compute(mirror.manager, row)
    mirror.follow()
    mirror.manager.fork(row)
    assert mirror.follow() == [(1, 0, 0), (1, 1, 1)]


def test_the_copy_of_a_shared_partial_block_is_told(mirror):
    manager = mirror.manager
    row = manager.add([1, 2, 3])
    compute(manager, row)
    manager.fork(row)
    mirror.follow()
    manager.append(row, [4])
    compute(manager, row)
    assert mirror.follow() == [(0, 1, 2)]


def test_a_duplicate_that_is_given_back_is_told(mirror):
    manager = mirror.manager
    rows = manager.add([1, 2, 3]), manager.add([1, 2, 4])
    manager.allocate(rows, [3, 3])
    mirror.follow()
    manager.confirm()
    assert mirror.follow() == [(1, 0, 0)]


def test_a_row_that_comes_back_from_the_host_is_told(mirror):
    manager = mirror.manager
    row = manager.add([1, 2, 3])
    compute(manager, row)
    mirror.follow()
    manager.swap_out([row], 1)
    manager.swap_in([row])
    assert mirror.follow() == [(0, 1, manager.table(row)[1])]


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
    computed = manager.rows.num_computed[list(rows)]
    manager._memory.place(np.array(rows), computed, computed + 1, one_each=True)
    manager._memory.growth.draw_promised()
    mirror.follow()
    assert mirror.differing_rows() == []


CALLS = st.sampled_from(
    ["add", "add", "compute", "compute", "compute all", "cancel", "append", "fork", "out", "in", "truncate", "reserve", "free"]
)  # fmt: skip


def act(manager: BlockManager, call: str, pick: int, tokens: list[int]) -> None:
    """One call on some live row; what cannot be done is refused and changes nothing."""
    live = manager.rows.live.tolist()
    if call == "add" or not live:
        manager.add(tokens)
        return
    row = live[pick % len(live)]
    to_go = int(manager.rows.num_tokens[row] - manager.rows.num_computed[row])
    if call == "compute":
        compute(manager, row)
    elif call == "compute all":
        manager.next_batch()
        compute(manager, *[each for each in live if manager.rows.num_tokens[each] > manager.rows.num_computed[each]])
    elif call == "cancel":
        manager.allocate([row], [to_go])
        manager.cancel()
    elif call == "append":
        manager.append(row, tokens)
    elif call == "fork":
        manager.fork(row)
    elif call == "out":
        manager.swap_out([row], pick % 3)
    elif call == "in":
        manager.swap_in([row])
    elif call == "truncate":
        manager.truncate(row, pick % 4)
    elif call == "reserve":
        manager.reserve([row], pick)
    else:
        manager.free([row])


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(
        st.tuples(CALLS, st.integers(0, 5), st.lists(st.integers(1, 2), min_size=1, max_size=6), st.booleans()),
        min_size=10,
        max_size=60,
    )
)
def test_replaying_the_changes_gives_the_tables(calls):
    mirror = Mirror(BlockManager(10, 2, host_blocks=6))
    for call, pick, tokens, is_asked in calls:
        try:
            act(mirror.manager, call, pick, tokens)
        except PagedError:
            continue
        if is_asked:
            mirror.follow()
            assert mirror.differing_rows() == []
    mirror.follow()
    assert mirror.differing_rows() == []
