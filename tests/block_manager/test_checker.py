"""The checkers are tested by planting each kind of corruption: what they cannot see, no other test can rely on.

Each plant reaches into the private state of a small healthy manager, or scheduler, and the check has to say what was done,
beginning with the invariant's number.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.block_manager.pool import _CONTENT
from paged.scheduler import Request, Scheduler, Status
from paged.scheduler.batch import Left

OWNER, CHILD, AWAY = 0, 1, 2  # Rows of the healthy manager.


def compute(manager: BlockManager, row: int) -> None:
    count = int(manager.rows.num_tokens[row] - manager.rows.num_computed[row])
    manager.allocate([row], [count])
    manager.confirm()


def healthy_manager() -> BlockManager:
    """Ten blocks of two tokens, four on the host, and one of each thing that can be corrupted.

        run 0 (blocks 0, 1) <- rows 0 and 1;  run 1, open (block 3) <- row 1, after node 1 of run 0
        run 2 (host 0, 1; cached in blocks 4, 5) <- row 2, swapped;  block 6: cached, run 3;  block 2: partial, of row 0

    Row 0 has closed its run; row 1 extends an open one.
    """
    manager = BlockManager(10, 2, host_blocks=4)
    compute(manager, manager.add([1, 2, 3, 4, 5]))
    compute(manager, manager.add([1, 2, 3, 4, 6, 7]))
    manager._memory.index.close_run(OWNER)
    compute(manager, manager.add([5, 5, 4, 4]))
    manager.swap_out([AWAY])
    last = manager.add([9, 9, 8])
    compute(manager, last)
    manager.free([last])
    return manager


def runs_of(manager: BlockManager) -> dict[int, Any]:
    return {run.id: run for run in manager._memory.index.runs.values()}


def list_a_free_block_twice(manager):
    free_list = manager._memory.device.free_list
    free_list._stack[0] = free_list._stack[1]


def miscount_the_cached_blocks(manager):
    manager._memory.device.free_list.num_cached += 1


def lose_a_free_block(manager):
    manager._memory.device.free_list.num_plain -= 1


def lose_a_free_host_block(manager):
    manager._memory.host.free_list.num_plain -= 1


def use_a_listed_block(manager):
    manager._memory.device.state[manager._memory.device.free_list.plain()[0]] = 1


def give_a_free_block_content(manager):
    manager._memory.device.state[manager._memory.device.free_list.plain()[0]] = -99


def take_content_from_a_cached_block(manager):
    manager._memory.device.state[manager._memory.device.free_list.cached()[0]] = 0


def name_a_block_twice(manager):
    manager._memory.tables.blocks[0, OWNER, 1] = manager._memory.tables.blocks[0, OWNER, 0]


def forget_that_a_row_is_swapped(manager):
    manager._memory.tables.is_swapped[AWAY] = False


def leave_the_tail_of_a_row_that_is_gone(manager):
    manager._memory.tables.uid[AWAY] = 0


def add_a_reference(manager):
    manager._memory.device.state[manager._memory.tables.blocks[0, OWNER, 0]] += 1


def add_a_host_reference(manager):
    manager._memory.host.state[0] += 1


def claim_a_hold(manager):
    manager._memory.device.kept[0] += 1


def shorten_a_table(manager):
    manager._memory.tables.num_blocks[OWNER] -= 1


def lengthen_a_table(manager):
    manager._memory.tables.num_blocks[OWNER] += 1


def shorten_a_host_tail(manager):
    manager._memory.tiers.tails[AWAY] = manager._memory.tiers.tails[AWAY][:1]


def mistake_the_slots_of_the_last_block(manager):
    manager._memory.tables.slot_base[OWNER] = 9


def mistake_the_last_token(manager):
    manager._memory.tables.last_token[OWNER] = 77


def compute_unknown_tokens(manager):
    manager._memory.tables.num_computed[OWNER] += 1


def forget_that_tokens_are_launched(manager):
    manager.append(CHILD, [8])
    manager.allocate([CHILD], [1])
    manager._memory.tables.num_launched[CHILD] -= 1


def compute_tokens_again(manager):
    manager.append(CHILD, [8])
    manager.allocate([CHILD], [1])
    manager._memory.tables.num_computed[CHILD] += 1


def end_batches_in_another_order(manager):
    for _ in range(2):
        manager.append(CHILD, [8])
        manager.allocate([CHILD], [1])
        manager.next_batch()
    manager._memory.flights.outstanding.reverse()


def wait_for_a_batch_that_has_ended(manager):
    runs_of(manager)[3].pending = [(1, 0)]


def wait_for_a_batch_that_does_not_know(manager):
    manager.append(CHILD, [8])
    manager.allocate([CHILD], [1])
    runs_of(manager)[3].pending = [(manager._memory.batch, 0)]


def wait_for_batches_out_of_order(manager):
    manager.append(CHILD, [8])
    manager.allocate([CHILD], [1])
    run = runs_of(manager)[3]
    run.pending = [(manager._memory.batch, 0)] * 2
    manager._memory.index.pending[manager._memory.batch] = [run]


def change_the_key_of_a_run(manager):
    runs_of(manager)[3].key += b"?"


def drop_the_parent_of_a_run(manager):
    del manager._memory.index.runs[runs_of(manager)[0].key]


def close_the_path_of_an_open_run(manager):
    manager._memory.index.paths[CHILD].open = None


def swap_two_host_blocks(manager):
    host = runs_of(manager)[2].blocks[1]
    host[0], host[1] = host[1], host[0]


def miscount_the_children(manager):
    runs_of(manager)[0].children[1] = 2


def forget_the_children(manager):
    runs_of(manager)[0].children = None


def mark_a_plain_block_as_carrying(manager):
    manager._memory.device.state[manager._memory.tables.blocks[0, OWNER, 2]] |= _CONTENT


def forget_that_a_host_block_carries(manager):
    manager._memory.host.state[0] &= ~_CONTENT


def empty_a_run(manager):
    runs_of(manager)[3].length = 0


def put_more_nodes_on_the_device_than_there_are(manager):
    runs_of(manager)[3].blocks[0] = np.array([6, 7])


def keep_a_node_that_resides_nowhere(manager):
    runs_of(manager)[3].blocks[0] = None


def mistake_the_run_of_a_block(manager):
    manager._memory.device.run[6] = runs_of(manager)[0]


def mistake_the_run_of_a_host_block(manager):
    manager._memory.host.run[0] = runs_of(manager)[0]


def name_one_block_for_two_nodes(manager):
    run = runs_of(manager)[0]
    run.blocks[0][1] = run.blocks[0][0]


def evict_as_another_run(manager):
    segments = manager._memory.device.free_list._queues[0]._segments
    number, blocks, nodes, when = segments.pop()
    assert nodes == (runs_of(manager)[3], 0, 1)
    segments.append((number, blocks, (runs_of(manager)[0], 0, 1), when))


def promise_and_do_not_draw(manager):
    manager._memory.growth.promise_one(OWNER, 3, 4)


def evict_a_parent_before_its_child(manager):
    manager._memory.index.close_run(CHILD)
    runs_of(manager)[0].blocks[0][1] = -1


def miscount_the_attentive_rows(manager):
    manager._memory.index.num_attentive += 1


def lose_a_path(manager):
    del manager._memory.index.paths[OWNER]


def lose_the_path_of_an_open_run(manager):
    del manager._memory.index.paths[CHILD]


def publish_what_is_not_launched(manager):
    manager._memory.tables.num_computed[OWNER] = manager._memory.tables.num_launched[OWNER] = 3


def mark_a_closed_row_lazy(manager):
    manager._memory.index.is_lazy[OWNER] = True


def lose_an_open_run(manager):
    del manager._memory.index.runs[manager._memory.index.paths[CHILD].open.key]


def change_a_token_under_a_node(manager):
    manager._memory.tables.tokens[OWNER, 1] = 77


def change_a_token_of_a_run(manager):
    run = runs_of(manager)[0]
    run.tokens = b"\x63" + run.tokens[1:]


def name_another_block_than_the_node(manager):
    manager._memory.tables.blocks[0, OWNER, 1] = 9


MEMORY_PLANTS: list[tuple[Callable[[BlockManager], None], str]] = [
    (list_a_free_block_twice, "1: a device block is in the free list twice."),
    (miscount_the_cached_blocks, "1: the device free list counts 4 cached blocks and holds 3."),
    (lose_a_free_block, "1: 2 free + 3 cached + 4 used device blocks are not 10."),
    (lose_a_free_host_block, "1: 1 free + 0 cached + 2 used host blocks are not 4."),
    (use_a_listed_block, "3: device blocks [7] are in the free list and used."),
    (give_a_free_block_content, "3: a free device block has content."),
    (take_content_from_a_cached_block, "3: a cached device block has no content."),
    (name_a_block_twice, "6: row 0 names a block twice: [0, 0, 2]."),
    (forget_that_a_row_is_swapped, "6: row 2 has a host tail and is not swapped."),
    (leave_the_tail_of_a_row_that_is_gone, "6: row 2 has a host tail and is not swapped."),
    (add_a_reference, "2: device block 0 has ref count 3 and 2 references."),
    (add_a_host_reference, "2: host block 0 has ref count 2 and 1 references."),
    (claim_a_hold, "2: device block 0 has ref count 2 and 3 references."),
    (shorten_a_table, "6: row 0 has 2 blocks for 5 tokens of 2 a block, 0 reserved."),
    (lengthen_a_table, "6: row 0 has 4 blocks for 5 tokens of 2 a block, 0 reserved."),
    (shorten_a_host_tail, "6: row 2 has 1 blocks for 4 tokens of 2 a block, 0 reserved."),
    (mistake_the_slots_of_the_last_block, "6: the slots of row 0's last block begin at 0, not 9."),
    (mistake_the_last_token, "6: the last token of row 0 is not 77."),
    (compute_unknown_tokens, "6: row 0 has 6 tokens computed, 5 launched and 5 known."),
    (forget_that_tokens_are_launched, "8: batches compute row 1 to token 7; 6 are launched."),
    (compute_tokens_again, "8: batch 5 computes row 1 from token 6; 7 come before."),
    (end_batches_in_another_order, "8: batches [6, 5] are out, which is not the order of their numbers."),
    (wait_for_a_batch_that_has_ended, "4: nodes of run 3 wait for batches [1]; [] are out."),
    (wait_for_a_batch_that_does_not_know, "4: no end of batches [5] confirms the nodes of run 3."),
    (wait_for_batches_out_of_order, "4: the pending nodes of run 3 do not rise: [(5, 0), (5, 0)]."),
    (change_the_key_of_a_run, "4: run 3 is found under another key than its own."),
    (drop_the_parent_of_a_run, "5: run 1 hangs off run 0, which is gone."),
    (close_the_path_of_an_open_run, "4: run 1 is open for row 1, which does not extend it."),
    (swap_two_host_blocks, "5: row 2 holds host block 0 at column 0, which is not its node's."),
    (miscount_the_children, "5: run 0 counts children {1: 2}; there are {1: 1}."),
    (forget_the_children, "5: run 0 counts children None; there are {1: 1}."),
    (mark_a_plain_block_as_carrying, "4: 6 device blocks carry a node; 5 nodes say that they reside there."),
    (forget_that_a_host_block_carries, "4: 1 host blocks carry a node; 2 nodes say that they reside there."),
    (empty_a_run, "5: run 3 has 0 nodes, and blocks or children of 1."),
    (put_more_nodes_on_the_device_than_there_are, "5: run 3 has 1 nodes, and blocks or children of 2."),
    (keep_a_node_that_resides_nowhere, "5: the last node of run 3 resides nowhere and has no child."),
    (mistake_the_run_of_a_block, "4: device block 6 does not know that it holds node 3:0."),
    (mistake_the_run_of_a_host_block, "4: host block 0 does not know that it holds node 2:0."),
    (name_one_block_for_two_nodes, "4: device block 0 holds node 0:1 and one of run 0, too."),
    (evict_as_another_run, "4: device blocks [6] are to be evicted as nodes whose blocks are [0]."),
    (promise_and_do_not_draw, "6: 1 blocks are promised to rows and not drawn."),
    (evict_a_parent_before_its_child, "5: a node of run 1 is on the device and its parent node is not."),
    (miscount_the_attentive_rows, "4: 2 rows have to look their next block up; 3 are counted."),
    (lose_a_path, "4: row 0 has no path."),
    (lose_the_path_of_an_open_run, "4: row 1 has no path."),
    (publish_what_is_not_launched, "4: row 0 has 2 nodes and 1 full blocks launched."),
    (mark_a_closed_row_lazy, "4: row 0 is marked True for publishing by itself; its path says otherwise."),
    (lose_an_open_run, "4: row 1 extends a run that cannot be found."),
    (change_a_token_under_a_node, "4: row 0 stands on nodes of run 0 with other tokens than its own."),
    (change_a_token_of_a_run, "4: row 0 stands on nodes of run 0 with other tokens than its own."),
    (name_another_block_than_the_node, "5: row 0 holds device block 9 at column 1, which is not its node's."),
]


@pytest.mark.parametrize(("plant", "sentence"), MEMORY_PLANTS, ids=[plant.__name__ for plant, _ in MEMORY_PLANTS])
def test_the_memory_check_tells_a_planted_corruption(plant, sentence):
    manager = healthy_manager()
    plant(manager)
    assert sentence in manager.check()


def test_a_healthy_manager_has_no_violation():
    assert healthy_manager().check() == []


@pytest.mark.parametrize("row", [0, 1])
def test_a_run_that_is_open_for_a_row_without_a_path_is_told(row):
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3], [5, 6, 7]):
        compute(manager, manager.add(tokens))
    del manager._memory.index.paths[row]
    assert f"4: run {row} is open for row {row}, which has no path." in manager.check()


def test_a_manager_without_prefix_caching_has_no_tree_to_check():
    manager = BlockManager(4, 2, prefix_caching=False)
    compute(manager, manager.add([1, 2, 3]))
    assert manager.check() == []


def test_a_manager_is_healthy_after_each_call_of_a_whole_life():
    manager = BlockManager(12, 2, host_blocks=6)
    first, second = manager.add([1, 2, 3, 4, 5]), manager.add([1, 2, 3, 4, 5])
    calls: list[Callable[[], object]] = [
        lambda: manager.allocate([first, second], [5, 5]),
        lambda: manager.cancel(),
        lambda: manager.allocate([first], [5]),
        lambda: manager.next_batch(),
        lambda: manager.allocate([second], [5]),
        lambda: manager.confirm(),
        lambda: manager.confirm(),
        lambda: manager.fork(first),
        lambda: manager.append(first, [6]),
        lambda: manager.allocate([first], [1]),
        lambda: manager.confirm(),
        lambda: manager.reserve([first], 5),
        lambda: manager.swap_out([second], 1),
        lambda: manager.swap_in([second]),
        lambda: manager.truncate(first, 1),
        lambda: manager.free([first, second]),
    ]
    found = []
    for call in calls:
        call()
        found.append(manager.check())
    assert found == [[]] * len(calls)


def test_a_load_that_holds_blocks_is_no_violation():
    manager = healthy_manager()
    manager._memory.device.keep(manager.table(OWNER).astype(np.int64))
    assert manager.check() == []


def healthy_scheduler() -> Scheduler:
    """ "a" and "b" run in one outstanding batch; "c" and "d" wait, because two sequences may run."""
    scheduler = Scheduler(BlockManager(8, 2, host_blocks=4), policy="fastgen", max_sequences=2)
    for name, first in (("a", 10), ("b", 20), ("c", 30), ("d", 40)):
        scheduler.add(Request(id=name, prompt=[first, first + 1, first + 2], max_tokens=3))
    scheduler.schedule()
    return scheduler


def reverse_the_waiting_queue(state):
    state.waiting._states.reverse()


def stand_in_two_queues(state):
    state.away.add(state.requests["a"])


def park_a_running_request(state):
    state.parked["a"] = state.requests["a"]


def mistake_a_status(state):
    state.requests["a"].status = Status.PAUSED


def drop_out_of_the_queue(state):
    state.waiting.remove(state.requests["c"])


def forget_a_request(state):
    del state.requests["d"]


def give_a_waiting_request_a_row(state):
    state.requests["c"].rows[0] = 0


def take_a_running_requests_row(state):
    state.requests["a"].rows[0] = -1


def mistake_the_owner_of_a_row(state):
    state.columns.owner[0] = state.requests["b"]


def mistake_the_sequence_of_a_row(state):
    state.columns.sequence[0] = 1


def outgrow_the_limit(state):
    state.requests["a"].max_total = (2,)


def call_a_running_request_swapped(state):
    state.requests["a"].status = Status.SWAPPED


def swap_a_running_request(state):
    state.manager.tiers.tails[0] = np.array([0])


def open_a_row_for_nobody(state):
    state.manager.add_counted(np.array([1, 2], np.int32), b"")


def mix_up_the_running_rows(state):
    state.running_rows._rows = state.running_rows.array(state.running)[::-1]


def promise_more_than_the_pool(state):
    state.books.bounded += [state.requests["a"], state.requests["b"]]
    state.columns.prolong(state.requests["a"].rows[0], 0, 16)


def outstand_twice(state):
    state.outstanding.batches.append(state.outstanding.batches[0])


def sample_for_one_that_has_ended(state):
    ended = copy(state.requests["a"])
    state.outstanding.batches[0].ticket.gone[0] = Left(ended, 0, is_void=False)


def forget_a_batch(state):
    state.outstanding.batches.clear()


def lower_the_budget(state):
    state.limits = replace(state.limits, max_tokens_per_step=5)


def lower_max_sequences(state):
    state.limits = replace(state.limits, max_sequences=1)


def corrupt_the_memory(state):
    state.manager.tables.last_token[0] = 77


SCHEDULER_PLANTS: list[tuple[Callable[[Any], None], str]] = [
    (reverse_the_waiting_queue, "11: the waiting queue is out of order."),
    (stand_in_two_queues, '9: request "a" is away and running.'),
    (park_a_running_request, '9: request "a" is running and parked.'),
    (mistake_a_status, '9: request "a" is paused and stands in the running queue.'),
    (drop_out_of_the_queue, "9: queues and requests differ: ['c']."),
    (forget_a_request, "9: queues and requests differ: ['d']."),
    (give_a_waiting_request_a_row, '9: request "c" is waiting and holds rows [0].'),
    (take_a_running_requests_row, '9: request "a" has 1 sequences alive and 0 rows.'),
    (mistake_the_owner_of_a_row, '9: row 0 does not know that it serves "a".'),
    (mistake_the_sequence_of_a_row, '9: row 0 does not know that it serves "a".'),
    (outgrow_the_limit, '8: request "a" has 3 tokens, more than it may.'),
    (call_a_running_request_swapped, '9: request "a" is swapped and holds device blocks.'),
    (swap_a_running_request, '9: request "a" is running and has blocks on the host.'),
    (open_a_row_for_nobody, "9: rows [2] are held by no request, or do not exist."),
    (mix_up_the_running_rows, "9: the array of running rows differs from the running requests."),
    (promise_more_than_the_pool, "8: 11 blocks are reserved for worst cases; the pool has 8."),
    (outstand_twice, "8: batches [1, 1] are out, not rising."),
    (sample_for_one_that_has_ended, '8: batch 1 samples for request "a", which has ended.'),
    (forget_a_batch, "8: rows [0, 1] are in flight; the outstanding batches have []."),
    (lower_the_budget, "8: batch 1 has 6 tokens, more than the budget."),
    (lower_max_sequences, "8: batch 1 has 2 rows, more than max_sequences."),
    (corrupt_the_memory, "6: the last token of row 0 is not 77."),
]


@pytest.mark.parametrize(("plant", "sentence"), SCHEDULER_PLANTS, ids=[plant.__name__ for plant, _ in SCHEDULER_PLANTS])
def test_the_schedulers_check_tells_a_planted_corruption(plant, sentence):
    scheduler = healthy_scheduler()
    plant(scheduler._state)
    assert sentence in scheduler.check()


def test_a_healthy_scheduler_has_no_violation():
    assert healthy_scheduler().check() == []
