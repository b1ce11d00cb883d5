"""Runs and the paths through them, against a plain list of nodes; and what a run lets go of when it shrinks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.block_manager import BlockManager
from paged.block_manager.runs import Path, Run


def path_of(lengths: list[int]) -> tuple[Path, list[tuple[Run, int]]]:
    """A path through runs that hang off one another after so many nodes each, and its nodes one by one."""
    path, nodes = Path(b""), []
    for run_id, length in enumerate(lengths):
        run = Run(run_id, b"", path.run, path.at, -1, 0)
        path.run, path.at, path.published = run, length - 1, path.published + length
        nodes += [(run, at) for at in range(length)]
    return path, nodes


def nodes_of(spans: list[tuple[Run, int, int]]) -> list[tuple[Run, int]]:
    return [(run, at) for run, first, stop in spans for at in range(first, stop)]


LENGTHS = st.lists(st.integers(1, 4), max_size=5)


@settings(max_examples=100, derandomize=True)
@given(LENGTHS, st.integers(0, 20))
def test_spans_are_the_nodes_from_the_first_one_asked_for(lengths, first):
    path, nodes = path_of(lengths)
    assert nodes_of(path.spans(first)) == nodes[first:]


@settings(max_examples=100, derandomize=True)
@given(LENGTHS, st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_truncating_keeps_the_first_nodes(lengths, keeps):
    path, nodes = path_of(lengths)
    for keep in keeps:
        path.truncate(keep)
        nodes = nodes[:keep]
        assert nodes_of(path.spans(0)) == nodes
        assert path.published == len(nodes)
        assert (path.run, path.at) == (nodes[-1] if nodes else (None, -1))


def test_spans_come_one_a_run():
    path, nodes = path_of([2, 3])
    first, second = nodes[0][0], nodes[-1][0]
    assert path.spans(1) == [(first, 1, 2), (second, 0, 3)]


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


def test_a_run_loses_its_last_nodes_first(manager):
    evict(manager, 3)
    assert manager.lookup([1, 2, 3, 4]).num_tokens == 2


def test_a_trimmed_run_keeps_the_tokens_of_what_is_left(manager):
    run = only_run(manager)
    evict(manager, 3)
    assert run.tokens == np.array([1, 2], np.int32).tobytes()


def test_a_trimmed_run_keeps_the_blocks_of_what_is_left(manager):
    run = only_run(manager)
    evict(manager, 3)
    assert (run.blocks[0].tolist(), run.blocks[0].base, run.blocks[1]) == ([0], None, None)


def test_a_trimmed_run_forgets_the_hashes_of_what_is_gone(manager):
    row = manager.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.block_hashes(row)
    manager.free([row])
    run = only_run(manager)
    evict(manager, 3)
    assert run.digests is not None
    assert len(run.digests) == 1


def test_an_evicted_run_lets_its_content_go(manager):
    run = only_run(manager)
    evict(manager, 4)
    assert (run.tokens, run.blocks, run.parent) == (b"", [None, None], None)


def test_an_evicted_run_is_found_no_more(manager):
    evict(manager, 4)
    assert manager._memory.index.runs == {}


def test_an_evicted_child_lets_go_of_its_parent():
    manager = BlockManager(4, 2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]):
        row = manager.add(tokens)
        manager.allocate([row], [len(tokens) - int(manager.rows.num_computed[row])])
        manager.confirm()
        manager.free([row])
    parent, child = sorted(manager._memory.index.runs.values(), key=lambda run: run.id)
    evict(manager, 2)
    assert (parent.children, child.parent) == (None, None)
