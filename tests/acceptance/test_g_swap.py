"""Swap: a row's blocks go to the host and come back, and nothing else changes."""

import numpy as np
import pytest

from paged import Admission, Policy
from paged.errors import RowSwapped


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


def test_G2_a_return_with_lookahead_is_admitted_by_what_it_needs_in_all(fill, filled):
    manager, row = filled(4, 8, range(23), host_blocks=4)
    manager.swap_out([row])
    needs = [-(-(23 + lookahead) // 8) for lookahead in (3, 8, 10)]
    assert [manager.admission(need) for need in needs] == [Admission.OK, Admission.OK, Admission.NEVER]
    fill(manager, range(100, 115))
    assert [manager.admission(need) for need in needs] == [Admission.LATER, Admission.LATER, Admission.NEVER]


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
def test_G4_a_step_that_takes_memory_from_a_prompt_still_computes_something(make_scheduler, make_engine, policy):
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


def test_G8_a_requests_usage_counts_its_blocks_both_ways(make_scheduler, run):
    policy = Policy(name="swaps", take="tail", preemption="swap")
    scheduler = make_scheduler(6, 4, {"a": (12, 3), "b": (12, 3)}, host_blocks=6, policy=policy, prefix_caching=False)
    usage = {id: output.usage for taken in run(scheduler) for id, output in taken.outputs.items() if output.usage}
    stats = scheduler.stats()
    assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0
    assert (usage["a"].swapped_blocks, usage["b"].swapped_blocks) == (0, 2 * stats.swapped_in_blocks)
