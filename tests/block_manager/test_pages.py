"""Blocks of several pages in one pool: all pages of a block are drawn, evicted and given back together, under the first one's name."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager.pool import Pool
from paged.block_manager.runs import Run
from paged.errors import OutOfBlocks

RUN = Run(0, b"", None, -1, -1, 1)


@pytest.fixture
def pool():
    return Pool(10, "device", most_pages=4)


def pages(pool, blocks, count):
    return pool.pages_of(np.array(blocks), count).tolist()


def test_a_block_is_its_pages_in_the_order_in_which_they_were_drawn(pool):
    blocks = pool.draw(2, 3)
    assert (blocks.tolist(), pages(pool, blocks, 3)) == ([0, 3], [[0, 1, 2], [3, 4, 5]])
    assert pool.draw(1).tolist() == [6]
    assert (pool.num_free, pool.num_used) == (3, 7)


def test_where_there_is_no_block_there_is_no_page(pool):
    pool.draw(1, 2)
    assert (pages(pool, [[-1, 0]], 2), pages(pool, [-1], 1)) == ([[[-1, -1], [0, 1]]], [[-1]])


def test_all_pages_of_blocks_of_several_widths_come_block_by_block(pool):
    wide, narrow = pool.draw(1, 4), pool.draw(2)
    assert pool.all_pages_of(np.concatenate([narrow, wide])).tolist() == [4, 5, 0, 1, 2, 3]


def test_all_pages_of_a_block_go_back_and_may_become_others(pool):
    pool.draw(1, 2)
    blocks = pool.draw(2, 4)
    assert pages(pool, blocks, 4) == [[2, 3, 4, 5], [6, 7, 8, 9]]
    pool.release(blocks[:1])
    assert pool.num_free == 4
    again = pool.draw(2, 2)
    assert sorted(page for block in pages(pool, again, 2) for page in block) == [2, 3, 4, 5]
    pool.release(np.array([*again, *blocks[1:], 0]))
    assert (pool.num_free, sorted(pool.free_blocks().tolist())) == (10, list(range(10)))


def test_a_block_that_is_held_twice_keeps_its_pages(pool):
    block = pool.draw(1, 3)
    pool.hold(block)
    pool.release(block.copy())
    assert (pool.num_free, pool.num_refs(0)) == (7, 1)
    pool.release(block.copy())
    assert pool.num_free == 10


def test_too_few_pages_are_an_error_and_change_nothing(pool):
    pool.draw(2, 4)
    with pytest.raises(OutOfBlocks) as refused:
        pool.draw(1, 3)
    assert (refused.value.wanted, refused.value.free) == (3, 2)
    assert (pool.num_free, pool.free_blocks().tolist()) == (2, [8, 9])


def test_cached_blocks_count_in_pages_and_are_evicted_until_enough_are_free(pool):
    evicted = []
    pool.on_eviction(lambda taken, blocks: evicted.append(blocks.tolist()))
    first, second, third = pool.draw(1, 4), pool.draw(1, 3), pool.draw(1, 3)
    for block in (second, first):
        pool.carry(block, RUN)
        pool.release(block.copy())
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.num_used) == (0, 7, 7, 3)
    # Three pages do, and the block that was released first has them.
    assert set(pages(pool, pool.draw(1, 2), 2)[0]) <= {4, 5, 6}
    assert (evicted, pool.num_cached, pool.num_free) == ([[4]], 4, 1)
    # Eviction of a block gives more than is needed.
    pool.draw(1, 2)
    assert (evicted, pool.num_cached, pool.num_free) == ([[4], [0]], 0, 3)
    pool.release(third)
    assert pool.num_free == 6


def test_a_hit_takes_all_pages_of_a_cached_block(pool):
    block = pool.draw(1, 4)
    pool.carry(block, RUN)
    pool.release(block.copy())
    pool.hold(block)
    assert (pool.num_cached, pool.num_free, pool.num_used) == (0, 6, 4)
    pool.forget_content(block)
    pool.release(block.copy())
    assert pool.num_free == 10
