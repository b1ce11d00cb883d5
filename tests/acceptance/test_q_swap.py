"""Swap of layers of several kinds: of each group what the row still needs goes to the host and comes back, page by page, and its states."""

import numpy as np
import pytest

from paged import Costs, LayerGroup, Policy
from paged.errors import OutOfBlocks, RowSwapped

GROUPS = (LayerGroup("full", pages=2), LayerGroup("window", 3), LayerGroup("state", pages=3))
SWAPS = Policy(name="swaps", take="whole", preemption="swap")


def pages_of(manager, row):
    """The pages of a row in all groups, in order."""
    tables = [manager.group_pages(number, row) for number in range(len(manager.layout.groups))]
    return [page for table in tables for page in table.reshape(-1).tolist() if page >= 0]


def test_Q_a_swap_takes_every_page_that_the_groups_still_need(filled):
    manager, row = filled(40, 2, range(8), groups=GROUPS, host_blocks=12, prefix_caching=False)
    is_there = [manager.group_pages(number, row) >= 0 for number in range(3)]
    before = pages_of(manager, row)
    # Four full blocks of two pages, the window's last one, and a state.
    assert len(before) == 4 * 2 + 1 + 3
    out = manager.swap_out(row)
    assert out.device_to_host[:, 0].tolist() == before
    assert (manager.device.num_used, manager.host.num_free, manager.rows.num_blocks[row]) == (0, 0, 0)
    back = manager.swap_in(row)
    assert back.host_to_device[:, 0].tolist() == out.device_to_host[:, 1].tolist()
    assert back.host_to_device[:, 1].tolist() == pages_of(manager, row)
    for number in range(3):
        assert ((manager.group_pages(number, row) >= 0) == is_there[number]).all()
    assert (manager.rows.num_computed[row], manager.host.num_used) == (8, 0)


def test_a_full_block_that_is_on_the_device_comes_back_without_a_copy(filled):
    manager, row = filled(40, 2, range(8), groups=GROUPS, host_blocks=20)
    assert (len(manager.swap_out(row).device_to_host), manager.device.num_used) == (8 + 1 + 3, 0)
    # Four nodes are there still; the window and the state are its own.
    assert len(manager.swap_in(row).host_to_device) == 1 + 3


def cancelled_on_the_host(manager):
    """A row of 8 tokens whose second batch, of the last two, is taken back when it has gone to the host."""
    row = manager.add(range(8))
    manager.allocate(row, 6)
    manager.next_batch()
    manager.allocate(row, 2)
    manager.swap_out(row)
    manager.cancel()
    return row


def test_a_cancel_leaves_a_row_on_the_host_no_state(make_manager):
    manager = make_manager(40, 2, groups=GROUPS, host_blocks=20, prefix_caching=False)
    row = cancelled_on_the_host(manager)
    assert (manager.rows.num_launched[row], manager.host.num_used) == (0, 0)
    manager.allocate(row, 8)
    assert manager.group_pages(2, row).shape == (1, 3)


def test_a_kept_state_that_a_cancelled_batch_was_to_read_stays_kept(make_manager, fill):
    manager = make_manager(40, 2, groups=GROUPS, host_blocks=20)
    manager.free(fill(manager, [1, 2, 3, 4]))
    row = manager.add([1, 2, 3, 4, 5])
    assert manager.rows.num_computed[row] == 4
    manager.allocate(row, 1)
    manager.swap_out(row)
    manager.cancel()
    assert (manager.rows.num_launched[row], manager.device.num_used, manager.host.num_used) == (0, 0, 0)
    assert manager.extend_hit(row) == 4


def test_a_cancel_sets_a_row_without_states_back_on_the_host(make_manager):
    manager = make_manager(40, 2, groups=GROUPS[:2], host_blocks=20, prefix_caching=False)
    row = cancelled_on_the_host(manager)
    assert (manager.rows.num_launched[row], manager.host.num_used) == (6, 3 * 2 + 3)


def test_a_device_that_is_too_full_by_a_page_changes_nothing(fill, unchanged, filled):
    manager, row = filled(17, 2, range(8), groups=GROUPS, host_blocks=12, prefix_caching=False)
    manager.swap_out(row)
    fill(manager, [100])
    with unchanged(manager):
        with pytest.raises(OutOfBlocks, match="12 blocks wanted, 11 free on the device"):
            manager.swap_in(row)
        with pytest.raises(RowSwapped):
            manager.fork(row)


def test_forks_share_windows_on_the_host_and_have_a_state_each(filled):
    manager, row = filled(60, 2, range(7), groups=GROUPS, host_blocks=30, prefix_caching=False)
    child = manager.fork(row)
    # Four full blocks and two of the window, once; the state that both would read, twice.
    assert len(manager.swap_out([row, child]).device_to_host) == 4 * 2 + 2 + 2 * 3
    assert len(manager.swap_in([row, child]).host_to_device) == 4 * 2 + 2 + 2 * 3
    for number, is_shared in enumerate([True, True, False]):
        pages = [manager.group_pages(number, each).tolist() for each in (row, child)]
        assert (pages[0] == pages[1]) is is_shared
    manager.append(row, [7])
    manager.append(child, [8])
    # Each overwrites its own state; of what both would write, one has a copy.
    assert len(manager.allocate([row, child], [1, 1]).device_to_device) == 2 + 1
    manager.free([row, child])


@pytest.mark.parametrize(("a_page", "kind"), [(1e-9, "swap"), (1.0, "recompute")])
def test_the_cheaper_way_is_chosen_by_pages(make_scheduler, request_of, step, a_page, kind):
    costs = Costs(seconds_per_swapped_block=a_page, seconds_per_token=1e-3)
    policy = Policy(name="cheapest", take="tail", preemption="cheapest")
    groups = [LayerGroup("full"), LayerGroup("state")]
    scheduler = make_scheduler(6, 4, groups=groups, host_blocks=9, prefix_caching=False, policy=policy, costs=costs)
    for id in ("first", "second"):
        scheduler.add(request_of(id, 4, max_tokens=8))
    for _ in range(5):
        step(scheduler)
    assert step(scheduler).batch.preempted == (("second", kind),)
    swapped = scheduler.explain("second")
    assert (swapped.status, scheduler.manager.host.num_used) == (("swapped", 3) if kind == "swap" else ("waiting", 0))
    if kind == "swap":
        assert "keeps 0 blocks and has 3 on the host; it needs 4 blocks to go on" in str(swapped)


def test_Q_a_request_on_the_host_whose_batch_is_cancelled_begins_anew(make_scheduler, request_of, run):
    groups = [LayerGroup("full"), LayerGroup("state")]
    scheduler = make_scheduler(6, 4, groups=groups, host_blocks=9, prefix_caching=False, policy=SWAPS)
    for id in ("first", "second"):
        scheduler.add(request_of(id, 4, max_tokens=8))
    for _ in range(4):
        batch = scheduler.schedule()
        scheduler.update(batch, np.array([7, 7]))
    before = scheduler.schedule()
    after = scheduler.schedule()
    assert after.preempted == (("second", "swap"),)
    assert len(after.moves.device_to_host) == 3
    scheduler.cancel(after)
    scheduler.cancel(before)
    assert (scheduler.status("second"), scheduler.manager.host.num_used) == ("waiting", 0)
    tokens: dict[str, int] = {}
    for each in run(scheduler):
        for id, output in each.outputs.items():
            tokens[id] = tokens.get(id, 0) + len(output.token_ids)
    assert tokens == {"first": 4, "second": 4}


def test_a_tail_goes_with_its_windows_and_the_state_stays(filled):
    manager, row = filled(40, 2, range(8), groups=GROUPS, host_blocks=20, prefix_caching=False)
    state = manager.group_pages(2, row).tolist()
    assert len(manager.swap_out(row, keep=2).device_to_host) == 2 * 2 + 1
    assert manager.group_pages(2, row).tolist() == state
    assert (manager.group_pages(1, row) < 0).all()
    # The rest goes, too.
    assert len(manager.swap_out(row).device_to_host) == 2 * 2 + 3
    assert len(manager.swap_in(row).host_to_device) == 4 * 2 + 1 + 3
