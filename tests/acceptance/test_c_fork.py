"""Fork and copy-on-write: a fork costs nothing, the first write to a shared partial block costs one copy."""

import pytest

CASES = [(length, block_size) for length in (1, 9, 129) for block_size in (1, 8)]


@pytest.mark.parametrize(("length", "block_size"), CASES)
def test_C1_a_fork_shares_every_block_and_the_last_holder_frees_them(length, block_size, filled):
    manager, parent = filled(200, block_size, range(length))
    after_parent = manager.device.num_available
    child = manager.fork(parent)
    assert manager.device.num_available == after_parent
    assert manager.table(child).tolist() == manager.table(parent).tolist()
    assert (manager.rows.num_tokens[child], manager.rows.num_computed[child]) == (length, length)
    manager.free([parent])
    assert manager.device.num_available == after_parent
    manager.free([child])
    assert manager.device.num_available == 200


@pytest.mark.parametrize("appender_is_child", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 129])
def test_C3_a_shared_partial_block_is_copied_once_and_a_full_one_never(compute, length, appender_is_child, filled):
    manager, parent = filled(60, 8, range(length))
    child = manager.fork(parent)
    appender, other = (child, parent) if appender_is_child else (parent, child)
    manager.append(appender, [500])
    moves = compute(manager, appender)
    assert len(moves.device_to_host) == len(moves.host_to_device) == 0
    column = length // 8
    if length % 8:
        copies = [[manager.table(other)[column], manager.table(appender)[column]]]
        assert moves.device_to_device.tolist() == copies
    else:
        assert moves.device_to_device.tolist() == []


def test_C5_a_fork_doubles_the_references_and_not_the_blocks(filled):
    manager, parent = filled(6, 4, range(8))
    child = manager.fork(parent)
    assert manager.device.num_used == 2
    manager.free([parent])
    # The last block had two references: one is left.
    assert manager.device.num_used == 2
    manager.free([child])
    assert manager.device.num_used == 0


def test_C6_a_row_whose_sibling_is_gone_writes_in_place(compute, filled):
    manager, parent = filled(6, 4, range(6))
    child = manager.fork(parent)
    table = manager.table(parent).tolist()
    manager.free([child])
    manager.append(parent, [6])
    assert compute(manager, parent).is_empty
    assert manager.table(parent).tolist() == table


def test_a_fork_copies_a_partial_block_that_became_content_of_its_parent_alone(make_manager):
    manager = make_manager(6, 2)
    row = manager.add([1])
    manager.allocate([row], [2], unknown=1)
    child = manager.fork(row)
    manager.append(row, [2])
    manager.confirm()
    (block,) = manager.table(row).tolist()
    manager.free([row])
    manager.append(child, [9])
    moves = manager.allocate([child], [1])
    assert moves.device_to_device.tolist() == [[block, manager.table(child)[0]]]
    assert manager.lookup([1, 2, 0]).num_tokens == 2


def test_a_fork_does_not_inherit_what_an_earlier_tenant_of_the_row_shared(make_manager):
    manager = make_manager(num_blocks=8, block_size=1, host_blocks=8)
    leader = manager.add([0, 1, 2, 3])
    manager.allocate([leader], [4])
    follower = manager.add([0, 1, 2, 3, 4])
    manager.free([follower])
    manager.next_batch()
    row = manager.add([7])
    assert row == follower
    child = manager.fork(row)
    manager.swap_out([child])


def test_C9_a_host_block_that_was_to_be_content_is_given_up_whole_by_rows_that_are_away(make_manager):
    manager = make_manager(8, 4, host_blocks=4)
    row = manager.add(range(8))
    manager.allocate([row], [6])
    manager.confirm()
    manager.allocate([row], [2])
    child = manager.fork(row)
    manager.swap_out([row, child], 1)
    manager.cancel()
    assert manager.rows.num_launched[[row, child]].tolist() == [4, 4]
    manager.swap_in([row, child])
    assert (manager.device.num_used, manager.host.num_used) == (1, 0)
