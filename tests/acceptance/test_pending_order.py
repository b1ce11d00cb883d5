"""Rows that stand on what another batch is still computing: they are confirmed after it, and let go when it is cancelled."""

import pytest

from paged import BlockManager, RowInFlight

PROMPT = list(range(9))


@pytest.fixture
def pending():
    """Row 0 computes two blocks in one batch; row 1 shares the first of them and computes one more in the next batch."""
    manager = BlockManager(16, 4, host_blocks=8)
    manager.next_batch()
    leader = manager.add(PROMPT)
    manager.allocate([leader], [8])
    sharer = manager.add([*PROMPT[:4], 60, 61, 62, 63, 64])
    manager.next_batch()
    manager.allocate([sharer], [4])
    return manager, leader, sharer


def test_a_row_above_a_pending_block_of_another_batch_is_not_confirmed_before_it(pending):
    manager, leader, sharer = pending
    before = manager.snapshot()
    with pytest.raises(
        RowInFlight, match="row 0: .* Row 1 stands on what it computes, and is confirmed after it"
    ) as caught:
        manager.confirm([sharer])
    assert (caught.value.row, manager.snapshot() == before) == (leader, True)
    assert manager.cancel([leader]) == {sharer: 4}
    assert (manager.num_used, manager.cached_contents(), manager.check()) == (0, set(), [])


def test_it_is_confirmed_after_that_batch_or_together_with_it(pending):
    manager, leader, sharer = pending
    manager.confirm([sharer, leader])
    assert [int(manager.num_computed[row]) for row in (leader, sharer)] == [8, 8]
    assert (len(manager.cached_contents()), manager.check()) == (3, [])


def test_in_order_each_is_confirmed_by_itself(pending):
    manager, leader, sharer = pending
    manager.confirm([leader])
    manager.confirm([sharer])
    assert (len(manager.cached_contents()), manager.check()) == (3, [])


def test_a_fork_of_such_a_row_waits_as_well():
    manager = BlockManager(16, 4)
    manager.next_batch()
    leader = manager.add(PROMPT)
    manager.allocate([leader], [8])
    fork = manager.fork(manager.add([*PROMPT[:4], 60, 61, 62, 63, 64]))
    manager.next_batch()
    manager.allocate([fork], [4])
    with pytest.raises(RowInFlight, match="row 0"):
        manager.confirm([fork])
    manager.cancel([leader])
    assert (manager.num_used, manager.check()) == (0, [])


def test_a_row_that_gave_up_what_was_cancelled_shares_nothing_any_more_and_can_be_swapped(pending):
    manager, leader, sharer = pending
    manager.cancel([sharer])
    manager.cancel([leader])
    manager.swap_out([sharer])
    manager.swap_in([sharer])
    manager.allocate([sharer], [8])
    manager.confirm([sharer])
    assert (int(manager.num_computed[sharer]), manager.check()) == (8, [])
