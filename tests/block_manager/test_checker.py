"""The checkers are tested by planting each kind of corruption: what they cannot see, no other test can rely on.

A plant is a statement about the private state of a small healthy manager, or scheduler; the check has to say what was done, beginning
with the invariant's number.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from paged.block_manager import BlockManager, LayerGroup
from paged.block_manager.pool import _CONTENT
from paged.block_manager.runs import DEVICE, HOST
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


MEMORY_PLANTS = [
    ("device._stack[0] = device._stack[1]", "1: a device block is in the free list twice."),
    ("device.num_cached += 1", "1: the device free list counts 4 cached blocks and holds 3."),
    ("device.num_free -= 1", "1: 2 free + 3 cached + 4 used device blocks are not 10."),
    ("host.num_free -= 1", "1: 1 free + 0 cached + 2 used host blocks are not 4."),
    ("device.state[device.free_blocks()[0]] = 1", "3: device blocks [7] are in the free list and used."),
    ("device.state[device.free_blocks()[0]] = -99", "3: a free device block has content."),
    ("device.state[device.queues[0].blocks()[0]] = 0", "3: a cached device block has no content."),
    ("blocks[OWNER, 1] = blocks[OWNER, 0]", "6: row 0 names a block twice: [0, 0, 2]."),
    ("tables.is_swapped[AWAY] = False", "6: row 2 has a host tail and is not swapped."),
    ("tables.uid[AWAY] = 0", "6: row 2 has a host tail and is not swapped."),
    ("device.state[blocks[OWNER, 0]] += 1", "2: device block 0 has ref count 3 and 2 references."),
    ("host.state[0] += 1", "2: host block 0 has ref count 2 and 1 references."),
    ("device.kept[0] += 1", "2: device block 0 has ref count 2 and 3 references."),
    ("tables.num_blocks[OWNER] -= 1", "6: row 0 has 2 blocks for 5 tokens of 2 a block, 0 reserved."),
    ("tables.num_blocks[OWNER] += 1", "6: row 0 has 4 blocks for 5 tokens of 2 a block, 0 reserved."),
    ("tails[AWAY][0] = tails[AWAY][0][:1]", "6: row 2 has 1 blocks for 4 tokens of 2 a block, 0 reserved."),
    ("tables.slot_base[OWNER] = 9", "6: the slots of row 0's last block begin at 0, not 9."),
    ("tables.last_token[OWNER] = 77", "6: the last token of row 0 is not 77."),
    ("tables.num_computed[OWNER] += 1", "6: row 0 has 6 tokens computed, 5 launched and 5 known."),
    ("place(); tables.num_launched[CHILD] -= 1", "8: batches compute row 1 to token 7; 6 are launched."),
    ("place(); tables.num_computed[CHILD] += 1", "8: batch 5 computes row 1 from token 6; 7 come before."),
    (
        "for _ in '56': place(); manager.next_batch()\nmemory.flights.outstanding.reverse()",
        "8: batches [6, 5] are out, which is not the order of their numbers.",
    ),
    ("run[3].pending = {1: 0}", "4: nodes of run 3 wait for batches [1]; [] are out."),
    ("place(); run[3].pending = {memory.batch: 0}", "4: no end of batches [5] confirms the nodes of run 3."),
    (
        "place(); run[3].pending = {memory.batch: 0, memory.batch + 1: 0}",
        "4: the pending nodes of run 3 do not rise: {5: 0, 6: 0}.",
    ),
    ("run[3].key += b'?'", "4: run 3 is found under another key than its own."),
    ("del index.runs[run[0].key]", "5: run 1 hangs off run 0, which is gone."),
    ("index.paths[CHILD].open = None", "4: run 1 is open for row 1, which does not extend it."),
    (
        "run[2].blocks[HOST][:2] = run[2].blocks[HOST][1::-1]",
        "5: row 2 holds host block 0 at column 0, which is not its node's.",
    ),
    ("run[0].children[1] = 2", "5: run 0 counts children {1: 2}; there are {1: 1}."),
    ("run[0].children = {}", "5: run 0 counts children {}; there are {1: 1}."),
    (
        "device.state[blocks[OWNER, 2]] |= CONTENT",
        "4: 6 device blocks carry a node; 5 nodes say that they reside there.",
    ),
    ("host.state[0] &= ~CONTENT", "4: 1 host blocks carry a node; 2 nodes say that they reside there."),
    ("run[3].length = 0", "5: run 3 has 0 nodes, and blocks or children of 1."),
    ("run[3].blocks[DEVICE] = np.array([6, 7])", "5: run 3 has 1 nodes, and blocks or children of 2."),
    ("run[3].blocks[DEVICE] = None", "5: the last node of run 3 resides nowhere and has no child."),
    ("device.run[6] = run[0]", "4: device block 6 does not know that it holds node 3:0."),
    ("host.run[0] = run[0]", "4: host block 0 does not know that it holds node 2:0."),
    ("run[0].blocks[DEVICE][1] = run[0].blocks[DEVICE][0]", "4: device block 0 holds node 0:1 and one of run 0, too."),
    (
        "number, blocks, _, when = segments.pop(); segments.append((number, blocks, (run[0], 0, 1), when))",
        "4: device blocks [6] are to be evicted as nodes whose blocks are [0].",
    ),
    ("memory.growth.promise_one(OWNER, 3, 4)", "6: 1 blocks are promised to rows and not drawn."),
    (
        "index.close_run(CHILD); run[0].blocks[DEVICE][1] = -1",
        "5: a node of run 1 is on the device and its parent node is not.",
    ),
    ("index.num_looking_up += 1", "4: 2 rows have to look their next block up; 3 are counted."),
    ("del index.paths[OWNER]", "4: row 0 has no path."),
    ("index.paths[9] = index.paths[OWNER]", "4: rows [9] are closed and have paths."),
    ("del index.paths[CHILD]", "4: row 1 has no path."),
    ("tables.num_computed[OWNER] = tables.num_launched[OWNER] = 3", "4: row 0 has 2 nodes and 1 full blocks launched."),
    (
        "tables.looks_up[OWNER] = False",
        "4: row 0 is marked False for looking its next block up; its path says otherwise.",
    ),
    ("index.paths[OWNER].guard = 1", "4: the path of row 0 is closed, with guard 1."),
    ("index.paths[CHILD].guard = 0", "4: the path of row 1 is open, with guard 0."),
    ("del index.runs[run[1].key]", "4: row 1 extends a run that cannot be found."),
    ("tables.tokens[OWNER, 1] = 77", "4: row 0 stands on nodes of run 0 with other tokens than its own."),
    ("run[0].tokens = b'c' + run[0].tokens[1:]", "4: row 0 stands on nodes of run 0 with other tokens than its own."),
    ("blocks[OWNER, 1] = 9", "5: row 0 holds device block 9 at column 1, which is not its node's."),
]


@pytest.mark.parametrize(("plant", "sentence"), MEMORY_PLANTS)
def test_the_memory_check_tells_a_planted_corruption(plant, sentence):
    manager = healthy_manager()
    memory = manager._memory

    def place() -> None:
        manager.append(CHILD, [8])
        manager.allocate([CHILD], [1])

    names = {
        "CONTENT": _CONTENT,
        "manager": manager,
        "memory": memory,
        "tables": memory.tables,
        "blocks": memory.tables.blocks[0],
        "tails": memory.tiers.tails,
        "device": memory.device,
        "segments": memory.device.queues[0]._segments,
        "host": memory.host,
        "index": memory.index,
        "run": {run.id: run for run in memory.index.runs.values()},
        "place": place,
    }
    exec(plant, {"OWNER": OWNER, "CHILD": CHILD, "AWAY": AWAY, "DEVICE": DEVICE, "HOST": HOST, "np": np} | names)
    assert sentence in manager.check()


LAYER_PLANTS = [
    ("tables.first[1, 0] -= 1", "17: row 0 holds its window of 3 tokens from column 1 on, not 2."),
    ("tables.first[1, 0] += 1", "17: row 0 holds its window of 3 tokens from column 3 on, not 2."),
    ("tables.num_computed[0] -= 2", "17: row 0 holds its window of 3 tokens from column 2 on, not 1."),
    ("tables.blocks[1, 0, 2] = LAST", "2: device block LAST has ref count 1 and 2 references."),
    ("tables.blocks[2, 0, 0] = LAST", "2: device block STATE has ref count 1 and 0 references."),
    ("device.state[STATE] = 0", "2: device block STATE has ref count 0 and 1 references."),
    ("device._width[STATE] = 1", "1: 8 free + 0 cached + 7 used device blocks are not 20."),
    ("device._pages[STATE, 1] = LAST", "1: 8 free + 0 cached + 7 used device blocks are not 20."),
]


@pytest.mark.parametrize(("plant", "sentence"), LAYER_PLANTS)
def test_the_memory_check_tells_a_corruption_of_layers_of_several_kinds(plant, sentence):
    groups = [LayerGroup("full", pages=2), LayerGroup("window", 3), LayerGroup("state", pages=2)]
    manager = BlockManager(20, 2, groups=groups, prefix_caching=False)
    compute(manager, manager.add(range(7)))
    tables, device = manager._memory.tables, manager._memory.device
    assert (manager.check(), device.num_free) == ([], 8)
    names = {"LAST": tables.blocks.item(1, 0, 3), "STATE": tables.blocks.item(2, 0, 0)}
    exec(plant, {"tables": tables, "device": device} | names)
    for name, block in names.items():
        sentence = sentence.replace(name, str(block))
    assert sentence in manager.check()


def test_the_memory_check_tells_a_lost_reference_where_no_group_is_full():
    manager = BlockManager(8, 2, groups=[LayerGroup("window", 3)], prefix_caching=False)
    compute(manager, manager.add(range(3)))
    manager._memory.device.state[1] = 2
    assert "2: device block 1 has ref count 2 and 1 references." in manager.check()


@pytest.mark.parametrize("group", [LayerGroup("window", 3), LayerGroup("state")])
def test_the_memory_check_tells_a_block_that_is_in_another_place_than_its_node_says(group):
    manager = BlockManager(8, 2, groups=[LayerGroup("full"), group])
    row = manager.add(range(4))
    compute(manager, row)
    manager.free([row])
    (run,), place = manager._memory.index.runs.values(), manager._memory.layout.sides[0].place
    block = run.block(place, 1)
    assert manager.check() == []
    assert manager._memory.device.place[block] == place
    manager._memory.device.place[block] = DEVICE
    assert f"4: device block {block} does not know that it holds node 0:1." in manager.check()


@pytest.mark.parametrize("row", [0, 1])
def test_a_run_that_is_open_for_a_row_without_a_path_is_told(row):
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3], [5, 6, 7]):
        compute(manager, manager.add(tokens))
    del manager._memory.index.paths[row]
    assert f"4: run {row} is open for row {row}, which has no path." in manager.check()


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


SCHEDULER_PLANTS = [
    ("state.waiting._states.reverse()", "11: the waiting queue is out of order."),
    ("state.running._states.reverse()", "11: the running queue is out of order."),
    ("state.away.add(a)", '9: request "a" is away and running.'),
    ("state.idle['a'] = a", '9: request "a" is running and idle.'),
    ("a.status = Status.PAUSED", '9: request "a" is paused and stands in the running queue.'),
    ("state.waiting.remove(c)", "9: queues and requests differ: ['c']."),
    ("del state.requests['d']", "9: queues and requests differ: ['d']."),
    ("c.rows[0] = 0", '9: request "c" is waiting and holds rows [0].'),
    ("a.rows[0] = -1", '9: request "a" has 1 sequences alive and 0 rows.'),
    ("state.columns.owner[0] = b", '9: row 0 does not know that it serves "a".'),
    ("state.columns.sequence[0] = 1", '9: row 0 does not know that it serves "a".'),
    ("a.max_total = (2,)", '8: request "a" has 3 tokens, more than it may.'),
    ("a.status = Status.SWAPPED", '9: request "a" is swapped and holds device blocks.'),
    ("memory.tiers.tails[0] = [np.array([0])]", '9: request "a" is running and has blocks on the host.'),
    ("memory.add_counted(np.array([1, 2], np.int32), b'')", "9: rows [2] are held by no request, or do not exist."),
    (
        "state.running_rows._rows = state.running_rows.array(state.running)[::-1]",
        "9: the array of running rows differs from the running requests.",
    ),
    (
        "state.books.bounded += [a, b]; state.columns.prolong(a.rows[0], 0, 16)",
        "8: 11 blocks are reserved for worst cases; the pool has 8.",
    ),
    ("batches.append(batches[0])", "8: batches [1, 1] are out, not rising."),
    (
        "batches[0].ticket.gone[0] = Left(copy(a), 0, is_void=False)",
        '8: batch 1 samples for request "a", which has ended.',
    ),
    ("batches.clear()", "8: rows [0, 1] are in flight; the outstanding batches have []."),
    ("state.limits = replace(state.limits, max_tokens_per_step=5)", "8: batch 1 has 6 tokens, more than the budget."),
    ("state.limits = replace(state.limits, max_sequences=1)", "8: batch 1 has 2 rows, more than max_sequences."),
    ("memory.tables.last_token[0] = 77", "6: the last token of row 0 is not 77."),
]


@pytest.mark.parametrize(("plant", "sentence"), SCHEDULER_PLANTS)
def test_the_schedulers_check_tells_a_planted_corruption(plant, sentence):
    scheduler = healthy_scheduler()
    state = scheduler._state
    names = {"state": state, "memory": state.manager, "batches": state.outstanding.batches, **state.requests}
    exec(plant, {"np": np, "Status": Status, "Left": Left, "copy": copy, "replace": replace} | names)
    assert sentence in scheduler.check()


@pytest.mark.parametrize("build", [healthy_manager, healthy_scheduler])
def test_a_healthy_one_has_no_violation(build):
    assert build().check() == []
