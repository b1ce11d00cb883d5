"""Contiguous regions from a buddy allocator, against a map of every block."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from paged.study.policies.regions import Regions


def test_the_smallest_piece_that_is_large_enough_is_split():
    regions = Regions(12)
    regions.take(0, 1)
    # 8 is whole, and the 4 became 1 taken, 1 and 2; three blocks take four.
    assert (regions.largest_free, regions.fits([8, 2, 1]), regions.fits([8, 2, 2])) == (8, True, False)
    regions.take(1, 3)
    assert regions.largest_free == 4


@pytest.mark.parametrize(
    ("num_blocks", "count", "largest"),
    [(12, 1, 8), (12, 2, 4), (12, 3, 4), (12, 4, 2), (3, 4, 0), (1, 1, 1), (16, 1, 16)],
)
def test_an_empty_pool_has_so_many_regions_of_that_size_and_not_of_the_next(num_blocks, count, largest):
    regions = Regions(num_blocks)
    assert regions.largest(count) == largest
    assert not largest or regions.fits([largest] * count)
    assert not regions.fits([2 * largest or 1] * count)


def test_a_corrupted_piece_is_found():
    regions = Regions(6)
    regions.take(0, 2)
    assert regions.check() == []
    regions._held[0] = (1, 1)
    assert any("a region begins at block" in violation for violation in regions.check())


sizes = st.integers(1, 9)


@given(
    num_blocks=st.integers(1, 40),
    calls=st.lists(
        st.one_of(sizes, st.tuples(st.integers(0, 30)), st.lists(sizes, min_size=1, max_size=3)), max_size=60
    ),
)
def test_regions_never_overlap_and_all_that_fits_can_be_taken(num_blocks, calls):
    regions, held = Regions(num_blocks), []
    for owner, call in enumerate(calls):
        if isinstance(call, tuple):
            regions.give_back(held.pop(call[0] % len(held)) if held else owner)
        else:
            wanted = [call] if isinstance(call, int) else call
            if regions.fits(wanted):
                for number, size in enumerate(wanted):
                    assert regions.fits([size])
                    regions.take(100 * owner + number, size)
                    held.append(100 * owner + number)
        assert regions.check() == []
    for owner in held:
        regions.give_back(owner)
    assert regions.largest_free == Regions(num_blocks).largest_free and regions.owners == set()
    assert regions.check() == []
