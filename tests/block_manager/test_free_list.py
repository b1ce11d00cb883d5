"""What the list of free blocks keeps beside the order of what is cached, which the naive model compares in the machine of the manager."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager.free_list import FreeList
from paged.block_manager.runs import Run

HELD = 7  # What the state of a block in somebody's hands looks like: anything above 0.


class Desk:
    """A free list with its column, all blocks in somebody's hands, and the caller's part: who takes a block changes its state."""

    def __init__(self, num_blocks: int) -> None:
        self.state = np.zeros(num_blocks, np.int64)
        self.free_list = FreeList(self.state)
        self.state[self.free_list.take_plain(num_blocks)] = HELD

    def hit(self, blocks: list[int]) -> None:
        self.state[blocks] = HELD
        self.free_list.take_out(len(blocks))

    def cache(self, blocks: list[int]) -> None:
        self.free_list.put_cached(np.array(blocks, np.int64))

    @property
    def num_entries(self) -> int:
        return sum(
            len(blocks)
            for queue in (self.free_list._queues[0]._swept, self.free_list._queues[0]._segments)
            for _, blocks, *_ in queue
        )


def test_the_block_freed_last_comes_first():
    desk = Desk(6)
    for freed in ([3, 5], [1]):
        desk.state[freed] = 0
        desk.free_list.put_plain(np.array(freed))
    assert desk.free_list.take_plain(3).tolist() == [1, 5, 3]


RUN = Run(0, b"", None, -1, -1, 1)


def test_a_part_of_a_segment_takes_the_last_of_its_nodes():
    desk = Desk(6)
    desk.free_list.put_cached(np.array([5, 4, 3, 2, 1]), (RUN, 1, 6))
    parts = [part for count in (1, 2, 2) for part in desk.free_list.take_cached(count)]
    assert [blocks.tolist() for blocks, *_ in parts] == [[5], [4, 3], [2, 1]]
    assert [nodes for _, nodes, _ in parts] == [(RUN, 5, 6), (RUN, 3, 5), (RUN, 1, 3)]


@pytest.mark.parametrize(("num_live", "length"), [(0, 1), (0, 3), (0, 50), (100, 100)])
def test_stale_entries_do_not_pile_up_over_hits_of_one_length(num_live, length):
    """`num_live` blocks that nobody asks for again, each released by itself, and a prompt that comes and goes."""
    desk = Desk(num_live + length)
    for block in range(num_live):
        desk.cache([block])
    prompt = list(range(num_live, num_live + length))
    most = 0
    for _ in range(1000):
        desk.cache(prompt)
        most = max(most, desk.num_entries)
        desk.hit(prompt)
    assert most <= 2 * (num_live + length) + 64 + (2 * num_live or length)


def test_of_a_segment_that_a_hit_took_a_block_from_the_nodes_are_not_known():
    desk = Desk(6)
    desk.free_list.put_cached(np.array([2, 1, 0]), (RUN, 0, 3))
    desk.hit([0])
    ((blocks, nodes, _),) = desk.free_list.take_cached(2)
    assert (blocks.tolist(), nodes) == ([2, 1], None)


def test_sweeping_keeps_the_order():
    desk = Desk(13)
    for block in range(3):
        desk.cache([block])
    for _ in range(100):
        desk.cache(list(range(3, 13)))
        desk.hit(list(range(3, 13)))
    desk.cache([7])
    evicted = [blocks for blocks, *_ in desk.free_list.take_cached(4)]
    assert np.concatenate(evicted).tolist() == [0, 1, 2, 7]
