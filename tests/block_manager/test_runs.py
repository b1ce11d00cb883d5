"""What a run of content lets go of when it shrinks."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.block_manager.runs import Run


@pytest.fixture
def manager():
    """Four blocks of two tokens, all of them cached, as one run of four nodes."""
    manager = BlockManager(4, 2)
    row = manager.add([1, 2, 3, 4, 5, 6, 7, 8])
    manager.allocate([row], [8])
    manager.confirm()
    manager.free([row])
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
    assert (on_device.base, on_host) == (None, None)


def test_an_evicted_run_lets_its_content_go_and_is_found_no_more(manager):
    run = only_run(manager)
    evict(manager, 4)
    assert (run.tokens, run.blocks, run.parent, manager._memory.index.runs) == (b"", [None, None], None, {})


def test_an_evicted_child_lets_go_of_its_parent():
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]):
        row = manager.add(tokens)
        manager.allocate([row], [len(tokens) - int(manager.rows.num_computed[row])])
        manager.confirm()
        manager.free([row])
    parent, child = sorted(manager._memory.index.runs.values(), key=lambda run: run.id)
    evict(manager, 2)
    assert (parent.children, child.parent) == ({}, None)


def test_nodes_that_a_side_evicted_are_known_until_they_are_there_again():
    run = Run(0, b"", None, -1, -1, 1, blocks=[None] * 3)
    assert not run.was_evicted(2, 0, 9)
    run.note_evicted(2, 3, 5)
    run.note_evicted(2, 7, 8)
    asked = ((0, 3), (0, 4), (4, 5), (5, 7), (5, 8), (8, 9), (3, 3))
    assert [run.was_evicted(2, *span) for span in asked] == [False, True, True, False, True, False, False]
    assert not run.was_evicted(1, 0, 9)
    run.put(2, 3, np.array([11]))
    run.put(2, 7, np.array([12]))
    assert [run.was_evicted(2, *span) for span in ((0, 4), (4, 5), (5, 9))] == [False, True, False]
