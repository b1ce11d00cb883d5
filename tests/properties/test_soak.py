"""Thousands of random requests with aborts and cancels on a tiny pool: the free count ends where it began."""

import os

import pytest

from paged.testing import Violation, soak
from paged.testing.world import build_scheduler


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_the_free_count_ends_where_it_began(seed):
    num_requests = int(os.environ.get("PAGED_SOAK", "150"))
    report = soak(num_requests, seed=seed)
    assert report.num_requests >= num_requests
    assert report.num_free == 12


def test_a_block_that_stays_behind_is_a_violation():
    def build(world):
        scheduler = build_scheduler(world)
        scheduler.manager.reset_cache = lambda: True
        return scheduler

    with pytest.raises(Violation, match=r"12: \d+ of 12 blocks are free in the end"):
        soak(5, build=build)
