"""The checkers are tested by planting each kind of corruption: what they cannot see, no other test can rely on.

A plant is a statement about the private state of a small healthy manager, or scheduler; the check has to say what was done, beginning
with the invariant's number.
"""

from copy import copy

import numpy as np
import pytest
from msgspec.structs import replace

from paged.block_manager import BlockManager, LayerGroup
from paged.block_manager.pool import _CONTENT
from paged.block_manager.runs import DEVICE, HOST
from paged.scheduler import Request, Scheduler, Status
from paged.scheduler.batch import Left

from ..driving import computed  # noqa: TID252
from ..shown import shown_in  # noqa: TID252

OWNER, CHILD, AWAY = 0, 1, 2  # Rows of the healthy manager.


def healthy_manager() -> BlockManager:
    """Ten blocks of two tokens, four on the host, and one of each thing that can be corrupted.

        run 0 (blocks 0, 1) <- rows 0 and 1;  run 1, open (block 3) <- row 1, after node 1 of run 0
        run 2 (host 0, 1; cached in blocks 4, 5) <- row 2, swapped;  block 6: cached, run 3;  block 2: partial, of row 0

    Row 0 has closed its run; row 1 extends an open one.
    """
    manager = BlockManager(10, 2, host_blocks=4)
    computed(manager, [1, 2, 3, 4, 5])
    computed(manager, [1, 2, 3, 4, 6, 7])
    manager._memory.index.close_run(OWNER)
    computed(manager, [5, 5, 4, 4])
    manager.swap_out([AWAY])
    manager.free([computed(manager, [9, 9, 8])])
    return manager


@pytest.mark.parametrize(("plant", "sentence"), shown_in("block_manager/plants_memory.txt", ">>>"))
def test_the_memory_check_tells_a_planted_corruption(plant, sentence):
    manager = healthy_manager()
    memory = manager._memory
    assert manager.check() == []

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
    assert sentence.strip() in manager.check()


def test_a_load_that_holds_blocks_is_no_violation():
    manager = healthy_manager()
    manager._memory.device.keep(manager.table(OWNER).astype(np.int64))
    assert manager.check() == []


@pytest.mark.parametrize(("plant", "sentence"), shown_in("block_manager/plants_layer.txt", ">>>"))
def test_the_memory_check_tells_a_corruption_of_layers_of_several_kinds(plant, sentence):
    groups = [LayerGroup("full", pages=2), LayerGroup("window", 3), LayerGroup("state", pages=2)]
    manager = BlockManager(20, 2, groups=groups, prefix_caching=False)
    computed(manager, range(7))
    tables, device = manager._memory.tables, manager._memory.device
    assert (manager.check(), device.num_free) == ([], 8)
    names = {"LAST": tables.blocks.item(1, 0, 3), "STATE": tables.blocks.item(2, 0, 0)}
    exec(plant, {"tables": tables, "device": device} | names)
    for name, block in names.items():
        sentence = sentence.replace(name, str(block))
    assert sentence.strip() in manager.check()


def test_the_memory_check_tells_a_lost_reference_where_no_group_is_full():
    manager = BlockManager(8, 2, groups=[LayerGroup("window", 3)], prefix_caching=False)
    computed(manager, range(3))
    assert manager.check() == []
    manager._memory.device.state[1] = 2
    assert "2: device block 1 has ref count 2 and 1 references." in manager.check()


@pytest.mark.parametrize("group", [LayerGroup("window", 3), LayerGroup("state")])
def test_the_memory_check_tells_a_block_that_is_in_another_place_than_its_node_says(group):
    manager = BlockManager(8, 2, groups=[LayerGroup("full"), group])
    manager.free([computed(manager, range(4))])
    (run,), place = manager._memory.index.runs.values(), manager._memory.layout.sides[0].place
    block = run.block(place, 1)
    assert manager.check() == []
    assert manager._memory.device.place[block] == place
    manager._memory.device.place[block] = DEVICE
    assert f"4: device block {block} does not know that it holds node 0:1." in manager.check()
    run.blocks[DEVICE] = run.blocks[DEVICE][:0]
    assert "5: run 0 has content of other groups where the full one has none." in manager.check()


@pytest.mark.parametrize("row", [0, 1])
def test_a_run_that_is_open_for_a_row_that_does_not_extend_it_or_has_no_path_is_told(row):
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3], [5, 6, 7]):
        computed(manager, tokens)
    paths = manager._memory.index.paths
    paths[row].open = None
    assert f"4: run {row} is open for row {row}, which does not extend it." in manager.check()
    del paths[row]
    assert f"4: run {row} is open for row {row}, which has no path." in manager.check()


def healthy_scheduler() -> Scheduler:
    """ "a" and "b" run in one outstanding batch; "c" and "d" wait, because two sequences may run."""
    scheduler = Scheduler(BlockManager(8, 2, host_blocks=4), policy="fastgen", max_sequences=2)
    for name, first in (("a", 10), ("b", 20), ("c", 30), ("d", 40)):
        scheduler.add(Request(id=name, prompt=[first, first + 1, first + 2], max_tokens=3))
    scheduler.schedule()
    return scheduler


@pytest.mark.parametrize(("plant", "sentence"), shown_in("block_manager/plants_scheduler.txt", ">>>"))
def test_the_schedulers_check_tells_a_planted_corruption(plant, sentence):
    scheduler = healthy_scheduler()
    state = scheduler._state
    assert scheduler.check() == []
    names = {"state": state, "memory": state.manager, "batches": state.outstanding.batches, **state.requests}
    exec(plant, {"np": np, "Status": Status, "Left": Left, "copy": copy, "replace": replace} | names)
    assert sentence.strip() in scheduler.check()
