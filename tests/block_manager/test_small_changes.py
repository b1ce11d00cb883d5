"""What no other test noticed when it was changed a little (`make mutants`)."""

import numpy as np
import pytest

from paged import BlockManager, LayerGroup
from paged.base.arguments import int64_array
from paged.block_manager.content_key import root_prefix

from ..driving import computed  # noqa: TID252


def test_a_table_may_be_asked_to_hold_nothing():
    manager = BlockManager(4, 4)
    row = manager.add([1, 2, 3])
    manager.reserve([row], [0])
    assert manager.device.num_used == 0


def test_what_a_row_shared_while_a_batch_was_composed_that_stayed_empty_is_confirmed_with_the_next_one():
    manager = BlockManager(4, 1)
    manager.allocate([manager.add([0])], [1])
    manager.next_batch()
    sharer = manager.add([0, 1])
    manager.next_batch()
    manager.allocate([sharer], [1])
    assert (manager.confirm(), manager._memory.sharing.is_unconfirmed(sharer)) == (1, True)
    assert (manager.confirm(), manager._memory.sharing.is_unconfirmed(sharer)) == (3, False)


def test_a_swapped_row_that_is_cut_to_its_device_blocks_gives_those_on_the_host_back():
    manager = BlockManager(8, 2, host_blocks=8)
    row = computed(manager, [1, 2, 3, 4, 5, 6])
    manager.swap_out([row], keep=1)
    assert (manager.device.num_used, manager.host.num_used) == (1, 2)
    manager.truncate(row, 1)
    assert (manager.device.num_used, manager.host.num_used) == (1, 0)
    assert manager.check() == []


@pytest.mark.parametrize("kind", [list, lambda numbers: np.array(numbers, np.uint64)], ids=["list", "uint64"])
@pytest.mark.parametrize(("number", "is_one"), [(2**63 - 1, True), (2**63, False)])
def test_the_highest_integer_of_64_bits_is_one_and_those_above_it_are_none(kind, number, is_one):
    found = int64_array(kind([number]))
    assert found.tolist() == [number] if is_one else found is None


def test_where_no_group_is_full_neither_tier_lacks_positions_for_rows(monkeypatch):
    monkeypatch.setattr("paged.block_manager.layout._FREE_OF_COST_A_PAGE", 1)
    manager = BlockManager(8, 4, host_blocks=8, groups=[LayerGroup("window", 6)], prefix_caching=False)
    for _ in range(2):
        manager.swap_out([computed(manager, range(20), [4] * 5)])
    assert (manager.host.num_used, manager.check()) == (2 * 2, [])


def test_content_that_is_retained_once_more_does_not_go_before_what_follows_it():
    manager = BlockManager(3, 1)
    manager.free([computed(manager, [1, 2, 3])])
    manager.retain([1])
    manager.retain([1, 2])
    manager.allocate([manager.add([9, 8])], [2])
    assert manager.lookup([1, 2, 3]).num_tokens == 1


def test_what_is_retained_and_partly_on_the_host_is_retained_there_too():
    manager = BlockManager(5, 1, host_blocks=5, host_caching=True)

    manager.free([computed(manager, [1] * 4)])
    manager.free([computed(manager, [2] * 3, writes=False)])
    assert manager.lookup([1] * 5).host_tokens == 2
    assert manager.retain([1] * 4) == 4
    for token in range(3, 9):
        manager.free([computed(manager, [token] * 3)])
    assert manager.lookup([1] * 5).host_tokens == 2


def test_a_row_that_gets_no_token_draws_no_state():
    manager = BlockManager(8, 2, groups=[LayerGroup("full"), LayerGroup("state", pages=3)])
    rows = np.array([manager.add([1, 2, 3])] * 3)
    assert manager._memory.growth.lacking(rows, np.arange(3)).tolist() == [0, 4, 4]


def test_a_row_stands_nowhere_because_the_one_that_had_its_number_was_asked_to():
    manager = BlockManager(8, 2, groups=[LayerGroup("full"), LayerGroup("state")])
    manager.free([manager.add(range(9), keep_at=(4,))])
    assert manager._memory.sides.next_end(manager.add(range(9)), 0, 9) == 8


def test_a_row_owes_what_its_window_lacks_of_all_that_it_ever_holds_beside_full_blocks():
    manager = BlockManager(60, 4, groups=[LayerGroup("full"), LayerGroup("window", 6)])
    row = computed(manager, range(60), [24])
    # 5 blocks, and 2 in its window, which has 4 at most and 2 now.
    assert manager._memory.growth.owed(np.array([row]), np.array([44])).tolist() == [7]


def test_of_what_a_window_has_passed_what_is_wanted_goes_as_all_does_and_the_rest_next():
    manager = BlockManager(60, 4, groups=[LayerGroup("full"), LayerGroup("window", 6)])
    computed(manager, range(30), [4] * 7, keep_at=(8,))
    (run,) = manager._memory.index.runs.values()
    assert manager._memory.blocks.goes_next[run.blocks[2]].tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(("others_go_on", "parts_at", "goes_next"), [(0, 16, True), (1, 16, False), (0, 12, False)])
def test_a_state_that_a_row_went_on_from_goes_next_unless_others_went_on_there_too(others_go_on, parts_at, goes_next):
    manager = BlockManager(60, 4, groups=[LayerGroup("full"), LayerGroup("state")])
    others = [([*range(12), *range(50, 55)], (4, 1), ())][:others_go_on]
    for tokens, counts, keep_at in [(range(21), (12, 8, 1), (12,)), *others, ([*range(parts_at), *[60] * 5], (4,), ())]:
        manager.free([computed(manager, tokens, counts, keep_at=keep_at)])
    first, *_ = manager._memory.index.runs.values()
    assert manager._memory.blocks.goes_next[first.blocks[2][[2, 4]]].tolist() == [goes_next, False]


def test_content_that_its_last_holder_copies_stays_until_the_copy_has_run():
    manager = BlockManager(4, 2)
    manager.allocate([manager.add([0])], [4], unknown=[3])
    manager.fork(0)
    manager.append(0, [0, 0, 0])
    manager.confirm()
    manager.free([0])
    manager.append(1, [0])
    manager._memory.place(np.array([1]), np.array([1]), np.array([2]))
    assert (manager._memory.device.refs(0), manager.take_moves().device_to_device.tolist()) == (1, [[0, 2]])


@pytest.mark.parametrize("group", [LayerGroup("state", pages=3), LayerGroup("window", 5, pages=3)])
def test_what_a_hit_loads_of_a_state_or_window_is_not_drawn_before_it_was_copied(group):
    manager = BlockManager(11, 4, groups=[LayerGroup("full"), group], host_blocks=60, host_caching=True)
    for first in (0, 100, 200):
        manager.free([computed(manager, range(first, first + 9), (8, 1))])
    row = manager.add(range(9))
    assert manager.rows.num_computed[row] == 8
    manager.free([row])
    assert manager.device.num_used == 3


def test_what_a_row_has_computed_is_content_before_another_of_its_batch_computes_the_same():
    manager = BlockManager(24, 1)
    row = manager.add([1])
    manager.allocate([row], [3], unknown=[2])
    manager.next_batch()
    # Others have its next block pending when it is known, and stand on it; then their batch is cancelled.
    for tokens, count in (([1, 2, 9], 2), ([1, 2, 8], 1)):
        manager.allocate([manager.add(tokens)], [count])
    manager.append(row, [2, 3])
    manager.confirm()
    manager.cancel()
    manager.free([1, 2])
    manager.append(row, [5])
    manager.allocate([manager.add([1, 2, 3, 4]), row], [3, 1])
    assert manager.lookup([1, 2, 3, 4]).blocks.tolist() == manager.table(row)[:3].tolist()


def test_what_comes_next_may_be_found_while_the_row_that_computes_it_goes_on():
    manager = BlockManager(8, 2)
    computed(manager, [1, 2, 3])
    content, prompt = manager._memory.content, np.array([1, 2, 3, 4, 5], np.int32)
    assert content.may_be_found(prompt, root_prefix(None))
    manager.free([0])
    assert not content.may_be_found(prompt, root_prefix(None))


def test_of_what_a_window_holds_too_a_prompt_shares_all_that_is_computed():
    manager = BlockManager(8, 2, groups=[LayerGroup("full"), LayerGroup("window", 3)])
    computed(manager, range(7), [4])
    manager.allocate([0], [2])
    assert manager._memory.content.held_prefix(np.arange(7, dtype=np.int32), root_prefix(None)) == 2


def test_what_the_host_has_behind_a_block_that_is_still_computed_is_not_found():
    manager = BlockManager(6, 2, host_blocks=6, host_caching=True)
    manager.allocate([manager.add([1, 2, 9])], [2])
    arriving = manager.add([1, 2, 3, 4, 5, 6])
    manager.reserve([arriving], [3])
    manager._memory.set_computed(arriving, 6)
    manager.free([arriving])
    manager.reserve([manager.add([8])], [5])
    assert manager.host.num_used == 2
    found = manager.lookup([1, 2, 3, 4, 5, 6, 7])
    assert (found.num_tokens, found.host_tokens) == (2, 0)
    assert manager.check() == []


@pytest.mark.parametrize("group", [LayerGroup("state", pages=3), LayerGroup("window", 3)])
def test_a_row_that_begins_with_what_is_there_goes_on_with_what_came_meanwhile_and_lets_go_of_what_it_had(group):
    manager = BlockManager(60, 4, groups=[LayerGroup("full"), group])
    first = manager.add(range(19), keep_at=(8,))
    for count in (8, 1, 7, 3):
        manager.allocate([first], [count])
        manager.confirm()
        if count == 1:
            later = manager.add(range(30))
    used = manager.device.num_used
    assert (manager.rows.num_computed[later], manager.extend_hit(later)) == (8, 8)
    assert manager.device.num_used - used == (0 if group.kind == "state" else -1)
    manager.free([first])
    assert manager.extend_hit(later) == (3 if group.kind == "state" else 0)
    assert (manager.take_moves().device_to_device.shape[0], manager.check()) == (group.kind == "state", [])


def test_a_fork_that_computes_several_tokens_writes_them_to_a_copy_of_the_shared_block():
    manager = BlockManager(8, 4)
    computed(manager, [1, 2])
    manager.append(manager.fork(0), [3, 4, 5])
    manager._memory.place_one(1, 3)
    assert (manager.take_moves().device_to_device.tolist(), manager.table(1).tolist()) == ([[0, 1]], [1, 2])


def test_a_load_of_blocks_of_two_pages_takes_no_more_than_there_is_room_for():
    manager = BlockManager(8, 4, host_blocks=64, host_caching=True, groups=[LayerGroup("full", pages=2)])
    for first in (0, 100):
        manager.free(computed(manager, range(first, first + 16)))
    for token in (200, 300):
        computed(manager, [token] * 4)
    # Four pages are left: two of the four blocks that the host has come back.
    row = manager.add([*range(16), 99])
    assert (manager.rows.num_computed[row], manager.device.num_available, manager.check()) == (8, 0, [])
