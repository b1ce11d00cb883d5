"""Where a hit ends, by what each group still has: `x` is there, `-` is not. BEHAVIOURS F3, Q6 and Q7."""

from __future__ import annotations

import pytest

from paged.block_manager import BlockManager, LayerGroup
from paged.block_manager.runs import NUM_PLACES

SIZE = 2


def manager_with(group: LayerGroup, pattern: str) -> BlockManager:
    """Content of as many blocks as the pattern has letters, all of which the full group has, and the other one those with an x."""
    manager = BlockManager(100, SIZE, groups=[LayerGroup("full"), group])
    row = manager.add(range(SIZE * len(pattern)))
    for _ in pattern:
        manager.allocate(row, SIZE)
        manager.confirm()
    manager.free(row)
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
    assert is_there == [column >= blocks - reach for column in range(blocks)]
    assert manager.check() == []
