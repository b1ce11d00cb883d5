"""Swap: a row's blocks go to the host and come back, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from paged import Admission, Policy
from paged.errors import OutOfBlocks, RowSwapped


def test_G1_a_swap_out_names_the_rows_blocks_and_a_swap_in_is_its_mirror(compute, filled):
    manager, row = filled(4, 8, range(7), host_blocks=4, prefix_caching=False)
    manager.append(row, [7])
    compute(manager, row)
    table = manager.table(row).tolist()
    out = manager.swap_out([row])
    assert out.device_to_host[:, 0].tolist() == table
    assert (manager.device.num_free, manager.host.num_free) == (4, 3)
    assert manager.rows.num_blocks[row] == 0
    back = manager.swap_in([row])
    assert back.host_to_device[:, 0].tolist() == out.device_to_host[:, 1].tolist()
    assert back.host_to_device[:, 1].tolist() == manager.table(row).tolist()
    assert (manager.device.num_free, manager.host.num_free) == (3, 4)
    assert manager.rows.num_computed[row] == 8


def test_G1_a_node_that_is_still_on_the_device_comes_back_without_a_copy(filled):
    # With the prefix cache a full block goes as a node, and its device block stays behind as cached content.
    manager, row = filled(4, 8, range(8), host_blocks=4)
    assert len(manager.swap_out([row]).device_to_host) == 1
    assert (manager.device.num_used, manager.device.num_cached, manager.host.num_used) == (0, 1, 1)
    assert manager.swap_in([row]).is_empty
    assert (manager.device.num_used, manager.host.num_used) == (1, 0)
    assert manager.host.num_free + manager.host.num_cached == 4


def test_G1_a_node_that_left_the_device_comes_back_from_the_host(fill, filled):
    manager, row = filled(4, 8, range(16), host_blocks=4)
    out = manager.swap_out([row])
    manager.free([fill(manager, range(100, 132))])
    assert manager.lookup(range(100, 133)).num_tokens == 32
    back = manager.swap_in([row])
    assert back.host_to_device[:, 0].tolist() == out.device_to_host[:, 1].tolist()
    assert manager.table(row).tolist() == back.host_to_device[:, 1].tolist()
    assert manager.rows.num_computed[row] == 16


def test_G2_a_return_with_lookahead_is_admitted_by_what_it_needs_in_all(fill, filled):
    manager, row = filled(4, 8, range(23), host_blocks=4)
    manager.swap_out([row])
    needs = [-(-(23 + lookahead) // 8) for lookahead in (3, 8, 10)]
    assert [manager.admission(need) for need in needs] == [Admission.OK, Admission.OK, Admission.NEVER]
    fill(manager, range(100, 115))
    assert [manager.admission(need) for need in needs] == [Admission.LATER, Admission.LATER, Admission.NEVER]


def test_G2_a_return_that_finds_no_room_changes_nothing(fill, unchanged, filled):
    manager, row = filled(4, 8, range(23), host_blocks=4)
    manager.swap_out([row])
    fill(manager, range(100, 115))
    with unchanged(manager), pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        manager.swap_in([row])


def test_G3_a_swapped_row_holds_no_device_block_and_cannot_be_used(unchanged, filled):
    manager, row = filled(4, 4, range(6), host_blocks=4)
    manager.append(row, [6])
    manager.swap_out([row])
    assert (manager.device.num_used, manager.table(row).tolist()) == (0, [])
    with unchanged(manager):
        with pytest.raises(RowSwapped):
            manager.allocate([row], [1])
        with pytest.raises(RowSwapped):
            manager.fork(row)
    manager.swap_in([row])
    manager.allocate([row], [1])
    manager.confirm()
    assert manager.rows.num_computed[row] == 7


@pytest.mark.parametrize("policy", ["paged", "vllm"])
def test_G4_a_step_that_takes_memory_from_a_prompt_mid_way_still_computes_something(
    make_scheduler, make_engine, policy
):
    # A peer spends a step of 0 tokens on a swap; ours makes progress in the same step.
    scheduler = make_scheduler(17, 4, host_blocks=24, policy=policy, max_tokens_per_step=8)
    engine = make_engine(scheduler, {"short": (4, 20), "long": (60, 4)})
    mid_way = False
    while scheduler.has_unfinished:
        batch = engine.step()
        assert batch.num_scheduled_tokens >= 1
        mid_way |= bool(batch.preempted) and "long/0" not in engine.outputs
    assert mid_way
    assert [len(engine.outputs[name]) for name in ("short/0", "long/0")] == [20, 4]


def test_G6_a_round_trip_leaves_every_byte_where_the_table_says(fill, filled):
    manager, row = filled(6, 4, range(10), host_blocks=6)
    device, host = np.zeros((6, 4), int), np.zeros((6, 4), int)
    device.reshape(-1)[manager.slots(row, 0, 10)] = np.arange(1, 11)
    for source, destination in manager.swap_out([row]).device_to_host:
        host[destination] = device[source]
    other = fill(manager, range(100, 124))
    device[:] = -1
    manager.free([other])
    for source, destination in manager.swap_in([row]).host_to_device:
        device[destination] = host[source]
    assert device.reshape(-1)[manager.slots(row, 0, 10)].tolist() == list(range(1, 11))


def test_G6_blocks_that_two_rows_share_are_moved_once(fill, filled):
    manager, parent = filled(8, 4, range(10), host_blocks=8)
    child = manager.fork(parent)
    out = manager.swap_out([parent, child])
    # Two full blocks and one partial block, each once.
    assert (len(out.device_to_host), len(set(out.device_to_host[:, 0].tolist()))) == (3, 3)
    manager.free([fill(manager, range(100, 132))])
    back = manager.swap_in([parent, child])
    assert (len(back.host_to_device), manager.table(parent).tolist()) == (3, manager.table(child).tolist())


def test_G7_cached_content_on_the_host_gives_way_to_a_swap(fill, filled):
    manager, first = filled(4, 4, range(8), host_blocks=2)
    manager.swap_out([first])
    manager.swap_in([first])
    manager.free([first])
    assert (manager.host.num_free, manager.host.num_cached) == (0, 2)
    second = fill(manager, range(100, 108))
    assert len(manager.swap_out([second]).device_to_host) == 2
    assert (manager.host.num_cached, manager.host.num_used) == (0, 2)


def test_G8_only_the_tail_goes_when_a_prefix_is_kept(filled):
    manager, row = filled(6, 4, range(14), host_blocks=6)
    table = manager.table(row).tolist()
    out = manager.swap_out([row], keep=2)
    assert (out.device_to_host[:, 0].tolist(), manager.table(row).tolist()) == (table[2:], table[:2])
    manager.swap_in([row])
    assert (manager.rows.num_blocks[row], manager.table(row).tolist()[:2]) == (4, table[:2])
    assert manager.rows.num_computed[row] == 14


def test_G10_a_row_in_flight_goes_to_the_host_with_what_its_batch_computes(make_manager):
    manager = make_manager(6, 4, host_blocks=6)
    row = manager.add(range(6))
    manager.allocate([row], [6])
    table = manager.table(row).tolist()
    assert manager.swap_out([row]).device_to_host[:, 0].tolist() == table
    manager.confirm()
    assert (manager.rows.num_computed[row], manager.host.num_used) == (6, 2)
    manager.swap_in([row])
    assert manager.rows.num_blocks[row] == 2


def test_a_cancel_sets_a_swapped_row_back_and_gives_up_a_host_block_that_is_no_content_after_all(make_manager):
    manager = make_manager(6, 4, host_blocks=6)
    row = manager.add(range(8))
    manager.allocate([row], [6])
    manager.next_batch()
    manager.allocate([row], [2])
    manager.swap_out([row])
    manager.cancel()
    assert (manager.rows.num_launched[row], manager.host.num_used) == (4, 1)
    manager.cancel()
    assert (manager.rows.num_launched[row], manager.host.num_used, manager.host.num_free) == (0, 0, 6)


def test_G11_a_block_that_is_on_the_host_already_is_not_copied_again(compute, filled):
    manager, row = filled(6, 4, range(8), host_blocks=6)
    assert len(manager.swap_out([row]).device_to_host) == 2
    manager.swap_in([row])
    manager.append(row, range(8, 12))
    compute(manager, row)
    second = manager.swap_out([row])
    assert len(second.device_to_host) == 1, "only the block that is new since"


def test_G12_a_shared_prefix_stays_with_the_row_that_still_runs(fill, filled):
    manager, first = filled(8, 4, [*range(8), 50], host_blocks=8)
    second = fill(manager, [*range(8), 60])
    manager.swap_out([second])
    assert (manager.table(first).tolist(), manager.device.num_used) == ([0, 1, 2], 3)
    back = manager.swap_in([second])
    # The two shared nodes are on the device: only the private tail is copied.
    assert (len(back.host_to_device), manager.table(second).tolist()[:2]) == (1, [0, 1])


def test_G14_a_swapped_row_that_gives_up_a_kept_block_gives_up_all_behind_it(filled):
    manager, row = filled(6, 4, range(14), host_blocks=6)
    manager.swap_out([row], keep=2)
    assert manager.host.num_used == 2
    manager.truncate(row, 1)
    # Pins cover a prefix with what the row holds on the device: with block 1 gone, 2 and 3 are of no use to it.
    assert manager.host.num_used == 0
    assert (manager.rows.num_blocks[row], manager.rows.num_computed[row]) == (1, 4)


def test_G15_two_rows_that_come_back_together_share_what_they_shared(make_manager, fill):
    manager = make_manager(8, 4, host_blocks=8)
    rows = [fill(manager, [*range(8), token]) for token in (50, 60)]
    out = manager.swap_out(rows)
    # Two shared nodes and two private tails.
    assert (len(out.device_to_host), manager.host.num_used) == (4, 4)
    manager.free([fill(manager, range(100, 132))])
    assert len(manager.swap_in(rows).host_to_device) == 4
    first, second = (manager.table(row).tolist() for row in rows)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert manager.device.num_used == 4


def test_G5_a_block_that_is_cached_on_the_host_is_pinned_and_leaves_no_room_for_another(
    fill, compute, unchanged, filled
):
    manager, row = filled(8, 4, range(4), host_blocks=2)
    manager.swap_out([row])
    manager.swap_in([row])
    manager.swap_out([fill(manager, range(100, 104))])
    assert (manager.host.num_cached, manager.host.num_used) == (1, 1)
    manager.append(row, range(4, 8))
    compute(manager, row)
    # Its first block lies on the host, its second one needs the place that this one keeps.
    with unchanged(manager), pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free on the host"):
        manager.swap_out([row])


def test_G8_a_requests_usage_counts_its_blocks_both_ways(make_scheduler, run):
    policy = Policy(name="swaps", take="tail", preemption="swap")
    scheduler = make_scheduler(6, 4, {"a": (12, 3), "b": (12, 3)}, host_blocks=6, policy=policy, prefix_caching=False)
    usage = {id: output.usage for taken in run(scheduler) for id, output in taken.outputs.items() if output.usage}
    stats = scheduler.stats()
    assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0
    assert (usage["a"].swapped_blocks, usage["b"].swapped_blocks) == (0, 2 * stats.swapped_in_blocks)
