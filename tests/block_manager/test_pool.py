"""What a pool keeps beside the order of its free blocks, which the naive model compares in the machine of the manager."""

from __future__ import annotations

import numpy as np
import pytest

from paged.block_manager.pool import Pool
from paged.block_manager.runs import Run

RUN = Run(0, b"", None, -1, -1, 1)


class Desk:
    """A pool whose blocks are all in somebody's hands."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = Pool(num_blocks, "device")
        self.draw(num_blocks)

    def draw(self, count: int) -> list[int]:
        return self.pool.draw(count).tolist()

    def hit(self, blocks: list[int]) -> None:
        self.pool.hold(np.array(blocks))

    def cache(self, blocks: list[int]) -> None:
        """Release blocks with content, the last one evicted first."""
        self.pool.carry(np.array(blocks), RUN)
        self.pool.release(np.array(blocks))

    @property
    def num_entries(self) -> int:
        queue = self.pool.queues[0]
        return sum(len(blocks) for segments in (queue._swept, queue._segments) for _, blocks, *_ in segments)


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


def test_sweeping_keeps_the_order():
    desk = Desk(13)
    for block in range(3):
        desk.cache([block])
    for _ in range(100):
        desk.cache(list(range(12, 2, -1)))
        desk.hit(list(range(3, 13)))
    desk.cache([7])
    assert desk.draw(4) == [0, 1, 2, 7]
