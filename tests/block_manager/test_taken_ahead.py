"""What a row holds behind a hit that a window or a state ended: it computes those tokens again, and writes them nowhere."""

import numpy as np
import pytest

from paged.block_manager import BlockManager, LayerGroup

from ..driving import computed  # noqa: TID252

FULL, STATE, WINDOW = LayerGroup("full"), LayerGroup("state"), LayerGroup("window", 6, pages=2)
TOKENS = range(17)


def place(manager, row, count):
    """Put tokens in flight. Returns the first token that the row writes, by group."""
    manager.allocate(row, count)
    return [int(group.written_from[0]) for group in manager.groups()]


def of_one_before(groups, **options):
    """A manager, and the blocks of a row that computed TOKENS and ended where no other one can begin."""
    manager = BlockManager(40, 4, groups=groups, row_ends=False, **options)
    row = computed(manager, TOKENS)
    blocks = manager.table(row)[:4].tolist()
    manager.free(row)
    return manager, blocks


@pytest.fixture
def manager_and_blocks():
    return of_one_before([FULL, STATE])


def test_blocks_that_are_there_are_held_share_by_share_and_not_written(manager_and_blocks):
    manager, blocks = manager_and_blocks
    row = manager.add(TOKENS)
    assert manager.rows.num_computed[row] == 0
    found = []
    for count in (10, 1, 2, 4):
        found.append(place(manager, row, count))
        assert manager.table(row)[:4].tolist() == blocks[: manager.rows.num_blocks[row]]
        assert manager.check() == []
        manager.confirm()
    # The last token is left to compute, in a block of the row's own. States are written.
    assert found == [[10, 0], [11, 0], [13, 0], [16, 0]]
    assert manager.device.num_used == 5 + 1


def test_what_is_held_is_not_counted_twice():
    manager, blocks = of_one_before([LayerGroup("full", pages=3), STATE])
    manager.allocate(manager.add(range(100, 140)), 25)
    assert manager.device.num_available == 40 - 3 * 7 - 1
    row = manager.add(TOKENS)
    place(manager, row, 17)
    assert manager.table(row)[:4].tolist() == blocks
    assert manager.device.num_available == 40 - 3 * 7 - 1 - 3 * 5 - 1


def test_a_row_in_flight_goes_on_with_what_is_there(manager_and_blocks):
    manager, blocks = manager_and_blocks
    row = manager.add(TOKENS)
    assert place(manager, row, 7) == [7, 0]
    manager.next_batch()
    assert place(manager, row, 8) == [15, 0]
    assert manager.table(row).tolist() == blocks
    manager.cancel()
    manager.cancel()
    assert manager.device.num_used == 0 and manager.check() == []


def test_windows_draw_blocks_of_their_own():
    manager, blocks = of_one_before([FULL, WINDOW, STATE])
    row = manager.add(TOKENS)
    assert place(manager, row, 12) == [12, 0, 0]
    assert manager.table(row).tolist() == blocks[:3]
    pages = manager.group_pages(1, row)
    assert len(np.unique(pages)) == pages.size == 6


def test_a_fork_holds_no_more_than_its_length(manager_and_blocks):
    manager, blocks = manager_and_blocks
    row = manager.add(TOKENS)
    place(manager, row, 6)
    manager.confirm()
    child = manager.fork(row)
    assert manager.table(child).tolist() == blocks[:2]
    # Both write the rest of the block that they share, each in a copy.
    moves = manager.allocate([row, child], 1)
    assert moves.device_to_device[:, 0].tolist() == [blocks[1]] * 2
    assert [int(token) for token in manager.groups()[0].written_from] == [0, 0]
    assert manager.check() == []


def test_a_block_that_parts_from_what_is_there_is_written(manager_and_blocks):
    manager, blocks = manager_and_blocks
    row = manager.add([*TOKENS[:9], *range(90, 99)])
    assert place(manager, row, 18) == [8, 0]
    assert manager.table(row)[:2].tolist() == blocks[:2] and blocks[2] not in manager.table(row)


def test_what_a_batch_is_still_computing_is_not_taken():
    manager = BlockManager(40, 4, groups=[FULL, STATE])
    first = manager.add(TOKENS)
    manager.allocate(first, 17)
    manager.next_batch()
    second = manager.add(TOKENS)
    assert place(manager, second, 17) == [0, 0]
    assert not set(manager.table(first).tolist()) & set(manager.table(second).tolist())


def test_who_writes_all_takes_nothing():
    manager, blocks = of_one_before([FULL, STATE], takes_ahead=False)
    row = manager.add(TOKENS)
    assert place(manager, row, 17) == [0, 0]
    assert not set(manager.table(row).tolist()) & set(blocks)


def test_one_who_does_not_read_takes_nothing(manager_and_blocks):
    manager, _ = manager_and_blocks
    manager.allocate([manager.add(TOKENS, reads=False), manager.add(TOKENS)], 17)
    assert manager.groups()[0].written_from.tolist() == [0, 16]
