"""Ends of rows within a block: what is kept of them, and how they go."""

import pytest

from paged.block_manager import BlockManager, LayerGroup

from ..driving import computed  # noqa: TID252

GROUPS = (LayerGroup("full"), LayerGroup("state"))


@pytest.fixture
def manager():
    """10 pages of 4 tokens. A row of 10 tokens has ended: two nodes, an end, and its state."""
    manager = BlockManager(10, 4, groups=GROUPS)
    compute(manager, manager.add(range(10)))
    return manager


def compute(manager, row, *, ends=True):
    while (start := int(manager.rows.num_computed[row])) < manager.rows.num_tokens[row]:
        manager.allocate(row, manager.next_end(row, int(manager.rows.num_tokens[row])) - start)
        manager.confirm()
    if ends:
        manager.free(row)
    assert manager.check() == []


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_an_end_goes_with_the_nodes_before_it_though_it_was_used_later(host_blocks):
    manager = BlockManager(10, 4, groups=GROUPS, host_blocks=host_blocks, host_caching=host_blocks > 0)
    compute(manager, manager.add(range(10)))
    assert manager.lookup(range(12)).num_tokens == 10
    # It holds the end until the copies ran, and gives back the nodes before that.
    manager.free(manager.add(range(12)))
    other = manager.add(range(500, 502))
    manager.take_moves()
    manager.allocate(other, 2)
    manager.confirm()
    assert manager.lookup(range(12)).num_tokens == 10
    cached = manager.device.num_cached
    row = manager.add(range(600, 620))
    manager.allocate(row, 4 * manager.device.num_free)
    assert manager.check() == [] and manager.device.num_cached < cached
    assert manager.lookup(range(12)).num_tokens in (0, 8)
    manager.reserve(row, 6)
    assert (manager.check(), manager.device.num_free, manager.device.num_cached) == ([], 1, 0)


def test_an_end_stays_on_the_device_with_its_node_when_the_host_has_that_no_more():
    manager = BlockManager(12, 4, groups=GROUPS, host_blocks=4, host_caching=True)
    for tokens, writes in ((range(10), True), (range(100, 144), False), (range(200, 210), True)):
        manager.free(computed(manager, tokens, writes=writes))
    row = manager.add(range(12))
    manager.take_moves()
    manager.free(row)
    # What comes to the host now takes the place of copies of what the device has, too.
    manager.allocate(manager.add(range(300, 340)), 4 * manager.device.num_free + 4)
    assert manager.check() == [] and not manager.cached_contents("host")
    assert manager.lookup(range(12)).num_tokens == 10


def test_who_shares_nothing_leaves_no_end_and_one_who_does_not_read_begins_at_none(manager):
    assert manager.rows.num_computed[manager.add(range(12), reads=False)] == 0
    manager.reset_cache()
    compute(manager, manager.add(range(10), writes=False))
    assert manager.device.num_cached == 0


def test_a_row_leaves_no_end_on_a_block_that_another_row_has_computed():
    manager = BlockManager(10, 4, groups=GROUPS)
    first = manager.add([0] * 12)
    manager.allocate(first, 8)
    manager.confirm()
    # No state is kept there: it computes its first tokens itself, and holds the blocks that the first row has.
    row = manager.add([0] * 9 + [1])
    manager.allocate(row, 6)
    manager.confirm()
    assert manager.table(row).tolist() == manager.table(first)[:2].tolist()
    manager.free(row)
    manager.free(first)
    assert manager.check() == []


def test_where_no_block_can_be_copied_rows_begin_at_the_ends_of_blocks_alone():
    manager = BlockManager(10, 4, groups=GROUPS, row_ends=False)
    compute(manager, manager.add(range(10)))
    assert manager.lookup(range(12)).num_tokens == 8
    assert manager.rows.num_computed[manager.add(range(12))] == 8
    assert not len(manager.take_moves())


def test_an_end_is_no_content_to_readers_outside(manager):
    manager.take_events()
    row = manager.add([*range(10), 77, 78, 79])
    assert manager.rows.num_computed[row] == 10
    compute(manager, row)
    stored = [len(event.tokens) for event in manager.take_events() if hasattr(event, "tokens")]
    assert stored == [4]
    assert {len(block) for path in manager.cached_contents("device") for block in path[1:]} == {16}


def test_the_longest_end_that_is_there_is_taken(manager):
    compute(manager, manager.add([*range(10), 10, 11, 12, 13, 14]))
    assert [manager.lookup(range(stop)).num_tokens for stop in (10, 11, 15, 16)] == [8, 10, 12, 15]


def test_without_room_for_the_copies_a_row_begins_at_a_blocks_end():
    manager = BlockManager(6, 4, groups=GROUPS)
    compute(manager, manager.add(range(10)))
    assert manager.lookup(range(12)).num_tokens == 10
    compute(manager, manager.add([9]), ends=False)
    assert manager.lookup(range(12)).num_tokens in (0, 8)
    assert manager.rows.num_computed[manager.add(range(12))] in (0, 8)
    assert manager.check() == []


def test_who_begins_within_a_block_gets_no_token_without_a_page_for_its_state(manager):
    row = manager.add(range(12))
    memory = manager._memory
    assert (manager.rows.num_computed[row], memory.tokens_within(row, 0)) == (10, 10)
    assert memory.tokens_within(row, 1) == 12


def test_the_state_of_an_end_is_not_evicted_by_the_copies_of_its_blocks():
    manager = BlockManager(9, 4, groups=GROUPS)
    manager.free(computed(manager, range(6)))
    # The pool is full, and the end is what was used longest ago.
    manager.free(computed(manager, range(500, 520)))
    row = manager.add(range(7))
    assert manager.rows.num_computed[row] in (0, 6)
    assert (manager.group_pages(1, row) >= 0).all() or not manager.rows.num_computed[row]
    assert manager.check() == []


def test_a_row_that_goes_to_the_host_before_its_copies_ran_is_read_where_they_come_from():
    manager = BlockManager(20, 4, groups=GROUPS, host_blocks=8)
    compute(manager, manager.add(range(10)))
    source = manager.lookup(range(12)).blocks[-1]
    row = manager.add(range(12))
    copy = manager.table(row)[-1]
    moves = manager.swap_out(row)
    assert len(moves.device_to_device) == 0
    assert source in moves.device_to_host[:, 0] and copy not in moves.device_to_host[:, 0]


def test_copies_for_a_row_that_is_gone_are_not_made(manager):
    manager.free(manager.add(range(12)))
    assert len(manager.take_moves()) == 0
    row = manager.add(range(12))
    assert manager.take_moves().device_to_device[:, 1].tolist() == [manager.table(row)[-1]]


def test_a_row_number_that_is_given_again_within_a_batch_reads_its_own_state(manager):
    first = manager.add(range(12))
    manager.allocate(first, 1)
    manager.free(first)
    second = manager.add([9, 9, 9])
    assert second == first
    manager.allocate(second, 3)
    assert (manager.check(), manager.groups()[1].read[-1].tolist()) == ([], [-1])
    manager.confirm()
    manager.free(second)
    assert manager.check() == [] and manager.device.num_used == 0


def test_a_row_that_fell_to_its_beginning_reads_no_state_of_others():
    manager = BlockManager(40, 1, groups=GROUPS)
    row = manager.add([2, 2])
    manager.allocate(row, 1)
    manager.fork(row)
    manager.next_batch()
    manager.cancel()
    other = manager.add([5, 5, 5])
    manager.allocate(other, 2)
    manager.confirm()
    manager.fork(other)
    manager.allocate(row, 2)
    assert manager.groups()[1].read.tolist() == [[-1]]


def test_an_end_is_found_though_more_blocks_are_there_behind_it(manager):
    manager.free(computed(manager, range(17)))
    assert manager.lookup([*range(14), 99]).num_tokens == 10
