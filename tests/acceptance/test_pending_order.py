"""Rows that stand on what another batch is still computing: batches end in order, and they let go of what is cancelled."""

import pytest

from paged import BlockManager
from paged.errors import InvalidTokens, NothingInFlight

PROMPT = list(range(9))


@pytest.fixture
def pending():
    """Row 0 computes two blocks in one batch; row 1 shares the first of them and computes one more in the next batch."""
    manager = BlockManager(16, 4, host_blocks=8)
    leader = manager.add(PROMPT)
    manager.allocate([leader], [8])
    manager.next_batch()
    sharer = manager.add([*PROMPT[:4], 60, 61, 62, 63, 64])
    manager.allocate([sharer], [4])
    return manager, leader, sharer


def test_a_block_that_is_out_is_shared_by_a_later_batch(pending):
    manager, leader, sharer = pending
    assert manager.table(sharer)[0] == manager.table(leader)[0]
    assert (manager.lookup(PROMPT).num_tokens, manager.cached_contents(), manager.check()) == (8, set(), [])


def test_batches_are_confirmed_in_their_order(pending):
    manager, leader, sharer = pending
    manager.confirm()
    assert [int(manager.rows.num_computed[row]) for row in (leader, sharer)] == [8, 4]
    assert (len(manager.cached_contents()), manager.check()) == (2, [])
    manager.confirm()
    assert [int(manager.rows.num_computed[row]) for row in (leader, sharer)] == [8, 8]
    assert (len(manager.cached_contents()), manager.check()) == (3, [])
    with pytest.raises(NothingInFlight):
        manager.confirm()


def test_the_latest_is_cancelled_first_and_a_sharer_lets_go_with_the_batch_that_computes_what_it_shares(pending):
    manager, leader, sharer = pending
    assert manager.cancel() == {}
    assert (int(manager.rows.num_launched[sharer]), manager.check()) == (4, [])
    assert manager.cancel() == {sharer: 4}
    assert (int(manager.rows.num_launched[sharer]), int(manager.rows.num_launched[leader])) == (0, 0)
    assert (manager.device.num_used, manager.cached_contents(), manager.check()) == (0, set(), [])


def test_a_row_that_gave_up_what_was_cancelled_shares_nothing_any_more_and_can_be_swapped(pending):
    manager, _leader, sharer = pending
    manager.cancel()
    manager.cancel()
    manager.swap_out([sharer])
    manager.swap_in([sharer])
    manager.allocate([sharer], [8])
    manager.confirm()
    assert (int(manager.rows.num_computed[sharer]), manager.check()) == (8, [])


def test_a_leader_that_is_freed_in_flight_leaves_what_it_computes_to_those_who_share_it(pending):
    manager, leader, sharer = pending
    manager.free(leader)
    assert (manager.check(), int(manager.device.num_used)) == ([], 2)
    manager.confirm()
    manager.confirm()
    assert (len(manager.cached_contents()), int(manager.rows.num_computed[sharer]), manager.check()) == (3, 8, [])


def test_a_batch_is_confirmed_when_its_tokens_are_known(make_manager, unchanged):
    manager = make_manager(4, 4)
    row = manager.add([1, 2])
    manager.allocate(row, 3, unknown=1)
    with unchanged(manager), pytest.raises(InvalidTokens, match="up to 3, and 2 are known"):
        manager.confirm()
    manager.append(row, [7])
    manager.confirm()
    assert int(manager.rows.num_computed[row]) == 3
