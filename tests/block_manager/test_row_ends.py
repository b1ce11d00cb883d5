"""Ends of rows within a block: what is kept of them, and how they go."""

from __future__ import annotations

import pytest

from paged.block_manager import BlockManager, LayerGroup

GROUPS = (LayerGroup("full"), LayerGroup("state"))


@pytest.fixture
def manager():
    """10 pages of 4 tokens. A row of 10 tokens has ended: two nodes, an end, and its state."""
    manager = BlockManager(10, 4, groups=GROUPS)
    compute(manager, manager.add(range(10)))
    return manager


def compute(manager, row, *, ends=True):
    while (start := int(manager.rows.num_computed[row])) < manager.rows.num_tokens[row]:
        manager.allocate(row, manager.next_end(row, int(manager.rows.num_tokens[row])) - start)
        manager.confirm()
    if ends:
        manager.free(row)
    assert manager.check() == []


def test_an_end_goes_with_the_nodes_before_it_though_it_was_used_later(manager):
    assert manager.lookup(range(12)).num_tokens == 10
    # It holds the end until the copies ran, and gives back the nodes before that.
    manager.free(manager.add(range(12)))
    other = manager.add(range(500, 502))
    manager.take_moves()
    manager.allocate(other, 2)
    manager.confirm()
    assert manager.lookup(range(12)).num_tokens == 10
    cached = manager.device.num_cached
    row = manager.add(range(600, 620))
    manager.allocate(row, 4 * manager.device.num_free)
    assert manager.check() == [] and manager.device.num_cached < cached
    assert manager.lookup(range(12)).num_tokens in (0, 8)


def test_who_shares_nothing_leaves_no_end(manager):
    manager.reset_cache()
    compute(manager, manager.add(range(10), writes=False))
    assert manager.device.num_cached == 0


def test_one_who_does_not_read_begins_at_no_end(manager):
    assert manager.rows.num_computed[manager.add(range(12), reads=False)] == 0


def test_an_end_is_no_content_to_readers_outside(manager):
    manager.take_events()
    row = manager.add([*range(10), 77, 78, 79])
    assert manager.rows.num_computed[row] == 10
    compute(manager, row)
    stored = [len(event.tokens) for event in manager.take_events() if hasattr(event, "tokens")]
    assert stored == [4]
    assert {len(block) for path in manager.cached_contents("device") for block in path[1:]} == {16}


def test_the_longest_end_that_is_there_is_taken(manager):
    compute(manager, manager.add([*range(10), 10, 11, 12, 13, 14]))
    assert [manager.lookup(range(stop)).num_tokens for stop in (10, 11, 15, 16)] == [8, 10, 12, 15]


def test_without_room_for_the_copies_a_row_begins_at_a_blocks_end():
    manager = BlockManager(6, 4, groups=GROUPS)
    compute(manager, manager.add(range(10)))
    assert manager.lookup(range(12)).num_tokens == 10
    compute(manager, manager.add([9]), ends=False)
    assert manager.lookup(range(12)).num_tokens in (0, 8)
    assert manager.rows.num_computed[manager.add(range(12))] in (0, 8)
    assert manager.check() == []


def test_who_begins_within_a_block_gets_no_token_without_a_page_for_its_state(manager):
    row = manager.add(range(12))
    memory = manager._memory
    assert (manager.rows.num_computed[row], memory.tokens_within(row, 0)) == (10, 10)
    assert memory.tokens_within(row, 1) == 12
