"""Ends of content that nothing goes on behind, what goes next, and retentions that end early. Blocks have one token."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from paged import BlockManager
from paged.block_manager import DEVICE, NO_BLOCKS
from paged.block_manager.pool import Pool
from paged.block_manager.runs import Run

RUN = Run(0, b"", None, -1, -1, 1)


class Desk:
    """Rows come, leave their content, and go."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, 1)
        self.memory = self.manager._memory
        self.content = self.memory.content

    def open(self, tokens: list[int]) -> int:
        row = self.manager.add(tokens)
        self.manager.allocate([row], [len(tokens) - len(self.manager.table(row))])
        self.manager.confirm()
        return row

    def leave(self, tokens: list[int]):
        """The way of the content of a row that has ended."""
        row = self.open(tokens)
        way = self.content.way_of(row)
        self.manager.free([row])
        return way

    def loose(self, way) -> int:
        return len(self.memory.index.loose_end(DEVICE, way))

    def cached(self, tokens: list[int]) -> int:
        return self.manager.lookup([*tokens, 9]).num_tokens


@pytest.fixture
def desk():
    made = []

    def make(num_blocks):
        made.append(Desk(num_blocks))
        return made[-1]

    yield make
    for each in made:
        assert each.manager.check() == []


def test_all_of_a_path_that_nothing_goes_on_behind_is_loose_last_node_first(desk):
    desk = desk(8)
    way = desk.leave([1, 2, 3])
    row = desk.open([1, 2, 3, 4])
    table = desk.manager.table(row).tolist()
    # While a row holds it, nothing is.
    assert desk.loose(way) == 0
    desk.manager.free([row])
    assert desk.memory.index.loose_end(DEVICE, desk.content.way_to(desk.content.spans_of(way))).tolist() == []
    longer = desk.leave([1, 2, 3, 4])
    assert desk.memory.index.loose_end(DEVICE, longer).tolist() == table[::-1]


def test_what_others_go_on_behind_is_not_loose_and_is_when_they_have_gone(desk):
    desk = desk(6)
    first, second = desk.leave([1, 1, 2, 2]), desk.leave([1, 1, 3])
    assert (desk.loose(first), desk.loose(second)) == (2, 1)
    assert desk.content.demote(second)[1] == 1
    # The first one's end is all that is free; the second one's goes next.
    desk.manager.free([desk.open([4, 4])])
    assert desk.cached([1, 1, 3]) == 2 and desk.loose(first) == 4


def test_nodes_that_are_gone_are_passed_over(desk):
    desk = desk(4)
    way = desk.leave([1, 1, 1, 1])
    desk.manager.free([desk.open([2, 2])])
    assert desk.loose(way) == 2
    desk.manager.free([desk.open([3, 3, 3, 3])])
    assert desk.loose(way) == 0


def test_the_end_of_a_path_that_an_open_run_extends_is_not_loose(desk):
    desk = desk(6)
    row = desk.open([1, 1, 1])
    assert desk.loose(desk.content.way_of(row)) == 0
    desk.manager.free([row])


def test_at_most_so_many_blocks_are_demoted(desk):
    desk = desk(6)
    way = desk.leave([1, 1, 1, 1])
    desk.leave([2, 2])
    assert desk.content.demote(way, 1)[1] == 1
    desk.manager.free([desk.open([3])])
    assert (desk.cached([1] * 4), desk.cached([2, 2])) == (3, 2)


def test_what_is_demoted_is_retained_no_longer_and_what_is_before_it_is(desk):
    desk = desk(8)
    way = desk.leave([1, 1, 1, 2])
    other = desk.leave([1, 1, 3])
    desk.content.retain_node(way[0], 2, None)
    assert desk.content.demote(way)[1] == 2
    desk.content.demote(other)
    desk.leave([4, 4])
    desk.leave([5] * 4)
    # Nodes 1, 1 are still retained; all others have gone before the newest.
    assert (desk.cached([1, 1, 1, 2]), desk.cached([1, 1, 3]), desk.cached([5] * 4)) == (2, 2, 4)


def test_a_retention_that_is_ended_early_ends_once_and_others_of_the_same_nodes_stay(desk):
    desk = desk(4)
    way = desk.leave([1, 1])
    first = desk.content.retain_node(way[0], 3, 10.0)
    desk.content.retain_node(way[0], 1, None)
    desk.content.retentions.end(first)
    desk.content.retentions.end(first)
    assert desk.memory.device.level[desk.memory.index.loose_end(DEVICE, way)].tolist() == [1, 1]
    desk.manager.expire(10.0)
    assert desk.memory.device.level[desk.memory.index.loose_end(DEVICE, way)].tolist() == [1, 1]


def test_a_retention_until_a_time_that_has_passed_is_none(desk):
    desk = desk(4)
    way = desk.leave([1, 1])
    desk.manager.expire(5.0)
    assert desk.content.retain_node(way[0], 1, 5.0) is None
    assert desk.content.retain_node(way[0], 1, 5.1) is not None


def test_a_way_has_nothing_left_when_the_cache_was_reset(desk):
    desk = desk(4)
    way = desk.leave([1, 1])
    retained = desk.content.retain_node(way[0], 1, None)
    assert desk.manager.reset_cache()
    assert (desk.content.spans_of(way), desk.loose(way), desk.content.demote(way)[1]) == ([], 0, 0)
    desk.content.retentions.end(retained)
    desk.leave([1, 1])
    assert desk.content.spans_of(way) == []


# Of a pool


def cached(pool, count, level=0):
    blocks = pool.draw(count)
    pool.carry(blocks, RUN)
    pool.set_levels(blocks, np.full(count, level, np.int8))
    pool.release(blocks.copy())
    return blocks


def test_what_is_put_first_is_evicted_first_of_its_level_in_that_order():
    pool = Pool(6, "device")
    cached(pool, 2), (mine := cached(pool, 2)), cached(pool, 2)
    pool.put_first(mine[::-1].copy())
    assert pool.draw(2).tolist() == mine[::-1].tolist()


def test_what_is_put_first_stays_behind_lower_levels():
    pool = Pool(4, "device")
    mine, lower = cached(pool, 2, level=1), cached(pool, 2)
    pool.put_first(mine)
    assert pool.draw(2).tolist() == lower[::-1].tolist()


def test_levels_above_the_first_are_asked_for_once_an_eviction_and_what_went_before_is_forgotten_then():
    pool, asked, forgotten = Pool(4, "device"), [], []
    cached(pool, 1), cached(pool, 3, level=1)
    pool.on_eviction(lambda taken, blocks: forgotten.append(blocks.tolist()))
    pool.on_raised(lambda level, num: asked.append((level, num, sum(map(len, forgotten)))))
    drawn = pool.draw(3)
    assert asked == [(1, 2, 1)]
    assert sorted(chain(*forgotten)) == sorted(drawn.tolist()) and len(drawn) == 3


def test_without_blocks_there_is_nothing_to_put_first():
    pool = Pool(2, "device")
    pool.put_first(NO_BLOCKS)
    assert pool.num_cached == 0
