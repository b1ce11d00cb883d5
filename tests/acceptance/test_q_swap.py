"""Swap of layers of several kinds: of each group what the row still needs goes to the host and comes back, page by page, and its states."""

import pytest

from paged import Costs, LayerGroup, Policy

GROUPS = (LayerGroup("full", pages=2), LayerGroup("window", 3), LayerGroup("state", pages=3))


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


def test_forks_that_come_back_from_the_host_have_a_state_each_and_copy_what_both_write(filled):
    manager, row = filled(60, 2, range(7), groups=GROUPS, host_blocks=30, prefix_caching=False)
    child = manager.fork(row)
    # Four full blocks and two of the window, once; the state that both would read, twice.
    assert len(manager.swap_out([row, child]).device_to_host) == 4 * 2 + 2 + 2 * 3
    manager.swap_in([row, child])
    for each in (row, child):
        manager.append(each, [each])
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
