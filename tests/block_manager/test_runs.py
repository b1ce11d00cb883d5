"""What a run of content lets go of when it shrinks, and where a hit ends by what each group still has: BEHAVIOURS F3, Q6 and Q7."""

import numpy as np
import pytest

from paged.block_manager import BlockManager, LayerGroup
from paged.block_manager.runs import NUM_PLACES, Run

from ..driving import computed  # noqa: TID252


@pytest.fixture
def manager():
    """Four blocks of two tokens, all of them cached, as one run of four nodes."""
    manager = BlockManager(4, 2)
    manager.free([computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])])
    return manager


def only_run(manager: BlockManager) -> Run:
    (run,) = manager._memory.index.runs.values()
    return run


def evict(manager: BlockManager, num_blocks: int) -> None:
    row = manager.add([9] * (2 * num_blocks))
    manager.reserve([row], num_blocks)


def test_a_trimmed_run_keeps_tokens_blocks_and_hashes_of_what_is_left_alone(manager):
    row = manager.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.block_hashes(row)
    manager.free([row])
    run = only_run(manager)
    evict(manager, 3)
    on_device, on_host = run.blocks
    assert (run.tokens, on_device.tolist(), len(run.digests)) == (np.array([1, 2], np.int32).tobytes(), [0], 1)
    assert (on_device.base, len(on_host)) == (None, 0)


def test_an_evicted_run_lets_its_content_go_and_is_found_no_more(manager):
    run = only_run(manager)
    evict(manager, 4)
    assert (run.tokens, [*map(len, run.blocks)], run.parent, manager._memory.index.runs) == (b"", [0, 0], None, {})


def test_an_evicted_child_lets_go_of_its_parent():
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]):
        manager.free([computed(manager, tokens)])
    parent, child = sorted(manager._memory.index.runs.values(), key=lambda run: run.id)
    evict(manager, 2)
    assert (parent.children, child.parent) == ({}, None)


SIZE = 2


def manager_with(group: LayerGroup, pattern: str) -> BlockManager:
    """Content of as many blocks as the pattern has letters, all of which the full group has, and the other one those with an x."""
    manager = BlockManager(100, SIZE, groups=[LayerGroup("full"), group])
    manager.free(computed(manager, range(SIZE * len(pattern)), [SIZE] * len(pattern)))
    memory = manager._memory
    (run,) = memory.index.runs.values()
    there = run.blocks[NUM_PLACES].copy()
    # A window of one token has nothing of the last block.
    assert (there >= 0).all() and len(there) >= len(pattern) - 1
    for column, letter in enumerate(pattern):
        if letter == "-" and column < len(there):
            run.drop(NUM_PLACES, column, column + 1)
            memory.device.forget_content(there[column : column + 1])
    assert manager.check() == []
    return manager


@pytest.mark.parametrize(
    ("group", "pattern", "blocks"),
    [
        (LayerGroup("window", 4), "xx-x--xx-xxx", 12),
        (LayerGroup("window", 4), "xx-x--xx---", 8),
        (LayerGroup("window", 4), "xx-x--xx---x", 8),
        (LayerGroup("window", 4), "----------", 0),
        (LayerGroup("window", 4), "-x--------", 0),
        (LayerGroup("window", 4), "x---------", 1),
        (LayerGroup("window", 1), "xxx---", 6),
        (LayerGroup("chunk", 4), "x-", 2),
        (LayerGroup("chunk", 4), "xxx", 3),
        (LayerGroup("chunk", 4), "xxx-", 4),
        (LayerGroup("chunk", 4), "--------" + "-", 8),
        (LayerGroup("chunk", 4), "--------" + "x", 9),
        (LayerGroup("chunk", 4), "--------" + "--", 10),
    ],
)
def test_F3_Q6_Q7_a_hit_ends_at_the_longest_length_at_which_the_group_can_stand(group, pattern, blocks):
    manager = manager_with(group, pattern)
    row = manager.add(range(SIZE * len(pattern) + 1))
    assert manager.rows.num_computed[row] == blocks * SIZE
    reach = -(-(group.reach - 1) // SIZE) if group.kind == "window" else blocks % (group.reach // SIZE)
    is_there = (manager.group_pages(1, row)[:, 0] >= 0).tolist()
    assert (is_there, manager.check()) == ([column >= blocks - reach for column in range(blocks)], [])
