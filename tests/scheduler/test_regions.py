"""Contiguous regions from a buddy allocator, against a map of every block."""

from hypothesis import given, strategies as st

from paged.study.policies.orca import Regions


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
