"""What a pool keeps beside the order of its free blocks, which the naive model compares in the machine of the manager."""

import numpy as np
import pytest

from paged.block_manager.pool import Pool, Retentions
from paged.block_manager.runs import Run

RUN = Run(0, b"", None, -1, -1, 1)


@pytest.mark.parametrize(("num_live", "length"), [(0, 1), (0, 3), (0, 50), (100, 100)])
def test_stale_entries_do_not_pile_up_over_hits_of_one_length(num_live, length):
    """`num_live` blocks that nobody asks for again, each released by itself, and a prompt that comes and goes."""
    pool = Pool(num_live + length, "device")
    blocks = pool.draw(num_live + length)
    for block in blocks[:num_live]:
        cache(pool, block)
    most = 0
    for _ in range(1000):
        cache(pool, *blocks[num_live:])
        queue = pool.queues[0]
        most = max(most, sum(len(its) for segments in (queue._swept, queue._segments) for _, its, *_ in segments))
        pool.hold(blocks[num_live:])
    assert most <= 2 * (num_live + length) + 64 + (2 * num_live or length)


def cache(pool, *blocks):
    """Release blocks with content, the last one evicted first."""
    pool.carry(np.array(blocks), RUN)
    pool.release(np.array(blocks))


def test_retentions_that_ended_early_hide_none_that_ends_later():
    retentions, run = Retentions([], host_gives_way=False), Run(0, b"", None, -1, -1, 1, 0)
    first, *_ = [retentions.retain({run: [(0, 0, 1)]}, 1, until) for until in (1.0, 9.0, 2.0)]
    retentions.end(first)
    for _ in range(70):
        retentions.end(retentions.retain({run: [(0, 0, 1)]}, 1, 100.0))
    assert retentions.next_end == 2.0
    retentions.expire(np.inf)
    assert retentions.next_end == np.inf
