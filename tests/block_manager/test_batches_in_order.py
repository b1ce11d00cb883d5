"""Batches end in order: what cancels, frees and forks leave behind while several batches are out; each case once broke a rule."""

from paged.block_manager import BlockManager


def place(manager, row, count=None):
    manager.allocate(
        [row], [int(manager.rows.num_tokens[row] - manager.rows.num_launched[row]) if count is None else count]
    )


def test_a_batch_whose_only_row_is_freed_while_it_is_composed_still_ends_and_confirms_its_nodes():
    manager = BlockManager(2, 1)
    row = manager.add([0])
    place(manager, row)
    manager.free([row])
    assert manager.cached_contents() == set()
    assert manager.confirm() == 1
    assert len(manager.cached_contents()) == 1


def test_a_cancel_withdraws_the_nodes_of_a_sharer_that_computes_on_in_the_same_batch():
    manager = BlockManager(2, 1)
    place(manager, manager.add([1]))
    place(manager, manager.add([1, 0]))
    manager.cancel()
    assert (manager.device.num_free, manager.lookup([1, 0, 0]).num_tokens, manager.check()) == (2, 0, [])


def test_a_fork_whose_block_was_switched_to_a_node_shares_what_it_computes_next_at_once():
    manager = BlockManager(4, 2)
    first = manager.add([0, 0])
    place(manager, first)
    second = manager.add([0, 0])
    place(manager, second)
    child = manager.fork(second)
    manager.confirm()
    manager.append(child, [1, 1])
    place(manager, child)
    assert manager.lookup([0, 0, 1, 1, 9]).num_tokens == 4


def test_a_batch_that_is_cancelled_after_the_cache_was_reset_has_nothing_to_withdraw():
    manager = BlockManager(1, 4)
    row = manager.add([0, 0, 0, 0])
    place(manager, row)
    manager.free([row])
    assert manager.reset_cache()
    manager.cancel()
    assert (manager.device.num_free, manager.check()) == (1, [])


def test_content_that_left_and_came_back_while_it_was_pending_is_told_once():
    manager = BlockManager(2, 1, host_blocks=2)
    manager.take_events()
    row = manager.add([1])
    place(manager, row)
    manager.swap_out([row])
    other = manager.add([2, 3], writes=False)
    place(manager, other)
    manager.free([other])
    manager.swap_in([row])
    manager.confirm()
    assert [type(event).__name__ for event in manager.events_snapshot()] == []
    assert sorted(event.tier for event in manager.take_events()) == ["device", "host"]


def test_a_host_block_that_never_gets_full_takes_the_shares_of_earlier_batches_with_it():
    manager = BlockManager(2, 2, host_blocks=1)
    row = manager.add([0, 0])
    place(manager, row, 1)
    manager.next_batch()
    place(manager, row)
    manager.swap_out([row])
    manager.cancel()
    assert (manager.rows.num_launched[row], manager.check()) == (0, [])
    place(manager, row)
    assert manager.confirm() == 1
    assert manager.rows.num_computed[row] == 0


def test_what_a_row_shared_while_a_batch_was_composed_that_stayed_empty_is_confirmed_with_the_next_one():
    manager = BlockManager(4, 1)
    place(manager, manager.add([0]))
    manager.next_batch()
    sharer = manager.add([0, 1])
    manager.next_batch()
    place(manager, sharer)
    assert (manager.confirm(), manager._memory.is_unconfirmed(sharer)) == (1, True)
    assert (manager.confirm(), manager._memory.is_unconfirmed(sharer)) == (3, False)
