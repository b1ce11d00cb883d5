"""Block tables and slots: how many blocks a row takes, and where its tokens lie."""

import pytest

from paged import PagedError
from paged.testing.snapshots import snapshot

LENGTHS = (1, 16, 129)


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("appended", LENGTHS)
def test_B2_appending_takes_only_the_blocks_that_the_tail_cannot_hold(compute, block_size, length, appended, filled):
    manager, row = filled(300, block_size, range(length))
    before = manager.device.num_available
    manager.append(row, range(1000, 1000 + appended))
    assert manager.device.num_available == before
    compute(manager, row)
    new = blocks_for(length + appended, block_size) - blocks_for(length, block_size)
    assert before - manager.device.num_available == new


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("lookahead", LENGTHS)
def test_B3_reserved_slots_cost_when_reserved_and_nothing_when_filled(compute, block_size, length, lookahead, filled):
    manager, row = filled(300, block_size, range(length))
    before = manager.device.num_available
    wanted = blocks_for(length + lookahead, block_size)
    manager.reserve([row], [wanted])
    reserved = manager.device.num_available
    assert before - reserved == wanted - blocks_for(length, block_size)
    manager.append(row, range(1000, 1000 + lookahead))
    compute(manager, row)
    assert (manager.device.num_available, manager.rows.num_computed[row]) == (reserved, length + lookahead)


def test_B5_a_block_has_a_node_once_it_is_full(compute, filled):
    # "Hashed" in the source reads "has a node" here.
    manager, row = filled(10, 16, range(55))
    assert (manager.rows.num_blocks[row], len(manager.cached_contents())) == (4, 3)
    manager.append(row, range(55, 59))
    compute(manager, row)
    assert (manager.rows.num_blocks[row], len(manager.cached_contents())) == (4, 3)
    manager.append(row, range(59, 78))
    compute(manager, row)
    # 78 tokens: the last but one of five blocks is full, the last is not.
    assert (manager.rows.num_blocks[row], len(manager.cached_contents())) == (5, 4)
    assert manager.lookup(range(78)).num_tokens == 64


@pytest.mark.parametrize(("length", "slots"), [(8, range(16, 24)), (7, range(16, 23))])
def test_B7_slots_follow_the_table_and_end_with_the_tokens(make_manager, fill, length, slots):
    manager = make_manager(12, 2)
    fill(manager, range(100, 116))
    row = fill(manager, range(length))
    assert manager.table(row).tolist() == [8, 9, 10, 11]
    assert manager.slots(row, 0, length).tolist() == list(slots)


def test_B8_block_k_is_the_slots_from_4k_on(make_manager, fill):
    manager = make_manager(6, 4)
    rows = [fill(manager, [row] * 12) for row in range(2)]
    every = []
    for row in rows:
        slots = manager.slots(row, 0, 12).tolist()
        for column, block in enumerate(manager.table(row).tolist()):
            assert slots[4 * column : 4 * column + 4] == [4 * block, 4 * block + 1, 4 * block + 2, 4 * block + 3]
        every += slots
    assert len(set(every)) == 24


def test_B9_the_slots_of_a_middle_part_are_those_of_its_positions_and_none_lie_beyond_the_table(fill, filled):
    manager, filler = filled(4, 4, [9])
    row = fill(manager, range(10))
    manager.free([filler])
    assert manager.table(row).tolist() == [1, 2, 3]
    assert manager.slots(row, 3, 9).tolist() == [7, 8, 9, 10, 11, 12]
    assert manager.slots(row, 5, 5).tolist() == []
    with pytest.raises((PagedError, ValueError)):
        manager.slots(row, 0, 13)


def test_B10_a_sequence_allocated_and_freed_five_times_leaves_the_pool_whole(make_manager, fill):
    manager = make_manager(8, 4)
    for _ in range(5):
        manager.free([fill(manager, range(30))])
        assert manager.device.num_available == 8


def test_B12_a_row_gives_up_blocks_of_its_tail_and_none_that_it_does_not_have(unchanged, filled):
    # A peer drops any logical block; here blocks leave a table from its tail, so that what stays is a prefix.
    manager, row = filled(8, 2, range(5))
    assert manager.device.num_available == 5
    manager.truncate(row, 2)
    assert manager.device.num_available == 6
    with unchanged(manager):
        with pytest.raises((PagedError, ValueError)):
            manager.truncate(row, 4)
        with pytest.raises((PagedError, ValueError)):
            manager.truncate(row, -1)


@pytest.mark.parametrize(
    "column", ["block_tables", "num_blocks", "num_tokens", "num_computed", "tokens", "num_launched"]
)
def test_columns_that_a_caller_reads_cannot_be_written(filled, column):
    manager, _ = filled(8, 4, range(6))
    with pytest.raises(ValueError, match="read-only"):
        getattr(manager.rows, column)[0] = 99


def test_what_is_said_to_be_a_copy_can_be_written_and_changes_nothing(filled):
    manager, row = filled(8, 4, range(6), host_blocks=8)
    before = snapshot(manager)
    hit = manager.lookup(range(6)).blocks
    for array in (manager.device.ref_counts, manager.device.states, manager.device.levels, hit,
                  manager.rows.num_scheduled, manager.rows.live, manager.table(row), manager.host.ref_counts):  # fmt: skip
        array[:] = 5
    assert (snapshot(manager), manager.check()) == (before, [])
