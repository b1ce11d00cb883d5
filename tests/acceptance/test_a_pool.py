"""The pool and its free list: what is handed out, in which order, and what comes back."""

import pytest

from paged.errors import DuplicateRow, OutOfBlocks, UnknownRow
from paged.testing.snapshots import snapshot


def test_A2_a_full_pool_gives_back_the_block_that_was_freed_and_no_second_one(make_manager, fill):
    manager = make_manager(4, 4)
    rows = [fill(manager, [token]) for token in range(4)]
    for attempt in range(100):
        victim = rows[attempt % 4]
        freed = manager.table(victim).tolist()
        manager.free([victim])
        rows[attempt % 4] = fill(manager, [attempt])
        assert manager.table(rows[attempt % 4]).tolist() == freed
        extra = manager.add([9, 9])
        with pytest.raises(OutOfBlocks):
            manager.allocate([extra], [2])
        manager.free([extra])


def test_A3_the_free_count_before_the_ith_free_is_i(make_manager, fill):
    manager = make_manager(1024, 16)
    rows = [fill(manager, [row, row]) for row in range(1024)]
    for i, row in enumerate(rows):
        assert manager.device.num_free == i
        manager.free([row])
    assert manager.device.num_free == 1024


def test_A5_a_request_for_more_than_is_free_changes_nothing(make_manager, unchanged):
    manager = make_manager(10, 4)
    row = manager.add(range(99 * 4))
    with unchanged(manager), pytest.raises(OutOfBlocks, match="99 blocks wanted, 10 free") as caught:
        manager.allocate([row], [99 * 4])
    assert isinstance(caught.value, ValueError)
    assert (caught.value.wanted, caught.value.free) == (99, 10)
    assert manager.device.num_free == 10


def test_A7_a_row_freed_twice_is_unknown_the_second_time(make_manager, fill, unchanged):
    # Blocks are freed by row here, so the double mention is a row's and not a block's.
    manager = make_manager(7, 4)
    row, other = fill(manager, [1, 2, 3]), fill(manager, [4, 5])
    with unchanged(manager), pytest.raises(DuplicateRow):
        manager.free([row, row])
    manager.free([row])
    with unchanged(manager), pytest.raises(UnknownRow):
        manager.free([other, row])


def test_A8_block_0_is_ordinary_it_is_handed_out_and_comes_back(fill, filled):
    # A peer reserves block 0 as the null block; here padding lies beyond the pool and every block serves.
    manager, row = filled(1, 4, [1, 2])
    assert manager.table(row).tolist() == [0]
    manager.free([row])
    assert (manager.device.num_free, manager.table(fill(manager, [3])).tolist()) == (1, [0])


def test_A10_a_block_leaves_the_middle_of_the_free_list_and_returns_to_its_end(make_manager, fill):
    manager = make_manager(5, 2)
    rows = [fill(manager, [10 + content, content]) for content in range(5)]
    for row in rows:
        manager.free([row])
    # Pop: the least recently used block, 0.
    first = fill(manager, [99])
    assert manager.table(first).tolist() == [0]
    # Remove 2 from the middle (a prefix hit), then append it again.
    hit = manager.add([12, 2, 1])
    assert manager.table(hit).tolist() == [2]
    manager.free([hit])
    popped = [manager.table(fill(manager, [99 + more])).tolist() for more in range(1, 5)]
    assert popped == [[1], [3], [4], [2]]
    last = manager.add([50])
    with pytest.raises(OutOfBlocks, match="1 blocks? wanted, 0 free"):
        manager.allocate([last], [1])


def test_A12_A13_usage_is_the_share_of_used_blocks_and_not_of_layers(make_manager, fill):
    # A peer allocates a layer at a time; here a block is a block of every layer.
    manager = make_manager(10, 16)
    assert manager.device.usage == 0.0
    row = fill(manager, range(80))
    assert manager.device.usage == 0.5
    manager.free([row])
    # Cached content is not use.
    assert (manager.device.usage, manager.device.num_cached) == (0.0, 5)


def test_A15_a_table_gives_up_its_tail_and_then_the_rest(filled):
    manager, row = filled(6, 4, range(24), prefix_caching=False)
    assert (manager.rows.num_blocks[row], manager.device.num_free) == (6, 0)
    manager.truncate(row, 2)
    assert (manager.rows.num_blocks[row], manager.device.num_free) == (2, 4)
    assert (manager.rows.num_computed[row], manager.rows.num_tokens[row]) == (8, 24)
    manager.free([row])
    assert manager.device.num_free == 6
    with pytest.raises(UnknownRow):
        manager.table(row)


def test_A18_fragmentation_is_the_share_of_used_slots_without_a_token(make_manager, fill):
    manager = make_manager(8, 4)
    assert manager.stats().fragmentation == 0.0
    row = fill(manager, range(5))
    assert manager.stats().fragmentation == 3 / 8
    # A fork holds the same tokens in the same blocks.
    manager.fork(row)
    assert manager.stats().fragmentation == 3 / 8
    manager.reserve([row], [3])
    assert manager.stats().fragmentation == 7 / 12


def test_A19_a_snapshot_that_is_equal_to_itself_sees_every_change(compute, filled):
    manager, row = filled(8, 4, range(6))
    seen = [snapshot(manager)]
    assert snapshot(manager) == seen[0]
    for change in (
        lambda: manager.append(row, [6]),
        lambda: compute(manager, row),
        lambda: manager.reserve([row], [4]),
        lambda: manager.fork(row),
        lambda: manager.free([row]),
    ):
        change()
        assert snapshot(manager) not in seen
        seen.append(snapshot(manager))
