"""When there is no memory for a longer column the call raises MemoryError, and nothing has changed."""

from contextlib import contextmanager, suppress

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.testing.snapshots import snapshot

from ..driving import computed  # noqa: TID252

ALLOCATORS = ("empty", "zeros", "full", "concatenate", "resize", "repeat")


@contextmanager
def memory_for(num_arrays):
    """Only so many arrays can be made; the next one raises MemoryError. Yields a list that then holds one entry."""
    failed, left = [], [num_arrays]

    def failing(make):
        def made(*arguments, **named):
            if left[0] == 0:
                failed.append(make.__name__)
                raise MemoryError(make.__name__)
            left[0] -= 1
            return make(*arguments, **named)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ALLOCATORS:
            patch.setattr(np, name, failing(getattr(np, name)))
        yield failed


def num_failures(manager, call):
    """How many arrays the call makes: each of them could not be made, once, and the manager was as before."""
    for num_arrays in range(100):
        before = snapshot(manager)
        with memory_for(num_arrays) as failed, suppress(MemoryError):
            call()
        if not failed:
            assert manager.check() == []
            return num_arrays
        assert snapshot(manager) == before, f"array {num_arrays} ({failed})"
        assert manager.check() == []
    raise AssertionError("the call makes fewer arrays than this")


def shrink_columns(manager):
    """The tables have room for 64 blocks a row, as those of a new manager have."""
    tables = manager._memory.tables
    tables.blocks = tables.blocks[:, :, :64].copy()
    tables._tell_growth()


@pytest.fixture(params=[True, False], ids=["caching", "plain"])
def manager(request):
    return BlockManager(400, 1, host_blocks=400, prefix_caching=request.param)


def test_a_row_beyond_those_that_there_is_room_for_is_opened_whole_or_not_at_all(manager):
    manager.take_events()
    for token in range(64):
        manager.add([token, token])
    assert num_failures(manager, lambda: manager.add([99, 99])) > 7
    assert len(manager.rows.live) == 65


def test_a_prompt_longer_than_the_columns_is_kept_whole_or_not_at_all(manager):
    assert num_failures(manager, lambda: manager.add(np.arange(5000, dtype=np.int32))) >= 1
    row = int(manager.rows.live[0])
    assert num_failures(manager, lambda: manager.append(row, np.arange(20_000, dtype=np.int32))) >= 1


@pytest.mark.parametrize("num_rows", [1, 2])
def test_no_block_is_lost_when_tables_cannot_grow(manager, num_rows):
    rows = [manager.add(range(1000 * i, 1000 * i + 100)) for i in range(1, num_rows + 1)]
    assert num_failures(manager, lambda: manager.allocate(rows, [100] * num_rows)) >= 1
    manager.confirm()
    assert num_failures(manager, lambda: manager.reserve(rows, 200)) >= 1
    assert manager.device.num_used == 200 * num_rows


def test_a_hit_that_no_table_has_room_for_opens_no_row():
    manager = BlockManager(400, 1)
    manager.free(computed(manager, range(100)))
    shrink_columns(manager)
    assert num_failures(manager, lambda: manager.add(range(100))) >= 1
    assert manager.stats().queries == 2


def test_a_fork_is_whole_or_not_at_all(manager):
    rows = [computed(manager, [10 * token + 1000, 7]) for token in range(64)]
    assert num_failures(manager, lambda: manager.fork(rows[3])) > 7


def test_what_lies_on_the_host_stays_there_when_the_table_has_no_room(manager):
    row = computed(manager, range(100))
    manager.swap_out([row])
    shrink_columns(manager)
    assert num_failures(manager, lambda: manager.swap_in([row])) >= 1
    assert manager.rows.num_blocks[row] == 100


def test_a_batch_that_cannot_note_all_its_blocks_can_be_placed_when_there_is_memory():
    manager = BlockManager(400, 1, prefix_caching=False)
    row = manager.add(range(100))
    manager._memory.growth.take_changes()
    with memory_for(0), pytest.raises(MemoryError):
        manager.allocate([row], [100])
    assert (manager.device.num_used, manager.check()) == (0, [])
    manager.allocate([row], [100])
    changes = manager._memory.growth.take_changes()
    assert not any(column.flags.writeable for column in changes)
    assert changes.blocks.tolist() == manager.table(row).tolist()


def test_an_append_for_which_there_was_no_memory_is_not_paid_for_by_later_ones():
    manager = BlockManager(8, 2)
    row, other = manager.add([1, 2]), manager.add([3, 4])
    with memory_for(0), pytest.raises(MemoryError):
        manager.append(row, [5] * 5000)
    manager.append(row, [6])
    manager.append(other, [7])
    assert manager._memory.tables.tokens.shape[1] < 5000


def test_a_retention_for_which_there_was_no_memory_does_not_end_with_the_next_one():
    for num_arrays in range(20):
        manager = BlockManager(16, 2)
        for first in (10, 50):
            manager.free([computed(manager, [first + i for i in range(5)])])
        with memory_for(num_arrays) as failed, suppress(MemoryError):
            manager.retain([10, 11, 12, 13], until=5.0)
        manager.retain([50, 51, 52, 53], until=5.0)
        manager.expire(6.0)
    assert not failed, "all arrays of the call have failed once"
