"""Output lengths: of those that ended, and of what is still to come, as quantiles and as means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.scheduler.foresight import WINDOW, OutputLengths

NONE = np.empty(0, np.int64)


def lengths_of(*noted, assumed=0, cap=1000):
    lengths = OutputLengths(cap, assumed)
    for length in noted:
        lengths.note(length)
    return lengths


def remaining(lengths, written, going=NONE):
    return lengths.mean_remaining(np.array(written), np.array(going, np.int64)).tolist()


@given(
    st.lists(st.integers(1, 30), max_size=40),
    st.integers(0, 45),
    st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.8, 1.0]),
)
def test_a_guess_is_the_least_length_that_few_enough_of_those_still_there_are_longer_than(lengths, written, quantile):
    cap = 40
    known = lengths_of(*lengths, cap=cap)

    def longer(than):
        return sum(length > than for length in [*lengths, cap])

    found = int(known.remaining(np.array([written]), quantile)[0])
    allowed = (1.0 - quantile) * longer(written)
    expected = next(length for length in range(cap + 1) if longer(length) <= allowed)
    assert max(found, 1) == max(expected - written, 1)


def test_one_length_is_forgotten_for_each_that_comes():
    lengths = [(7 * number) % 90 + 1 for number in range(WINDOW + 300)]
    known = lengths_of(*lengths, cap=100)
    rising = sorted([*lengths[-WINDOW:], 100])
    assert known.remaining(np.array([0]), 0.5).tolist() == [rising[WINDOW - (WINDOW + 1) // 2]]
    assert [-length for length in known._rising] == [*reversed(rising), 0]


def test_with_the_cap_alone_an_output_is_as_long_as_it_may_be():
    assert OutputLengths(100).remaining(np.array([0, 30, 100]), 0.1).tolist() == [100, 70, 0]


def test_before_any_output_has_ended_all_orders_of_magnitude_are_as_likely():
    known = OutputLengths(4096, 64)
    guesses = [int(known.remaining(np.array([0]), share)[0]) for share in (0.25, 0.5, 0.75)]
    assert guesses == pytest.approx([8, 64, 512], rel=0.15)
    # What has gone on for long is taken to go on for about as long again.
    assert 1.5 < known.remaining(np.array([300]), 0.5)[0] / 300 < 3.5
    for _ in range(64):
        known.note(20)
    assert known.remaining(np.array([0]), 0.9).tolist() == [20]
    assert known.remaining(np.array([20]), 0.1).tolist() == [4076]


def test_the_mean_leaves_assumed_lengths_the_cap_and_what_left_the_window_out():
    assert lengths_of(assumed=64).mean is None
    assert lengths_of(10, 20, assumed=64).mean == 15
    assert lengths_of(*[5] * 300, *[7] * WINDOW).mean == 7
    assert lengths_of(*[5] * WINDOW, *[7] * (WINDOW // 2)).mean == 6


def test_a_sequence_goes_on_as_those_did_that_were_longer_where_any_are_known():
    assert remaining(lengths_of(10, 20, 30), [0, 9, 10, 15, 29]) == pytest.approx([20, 11, 15, 10, 1])
    assert np.isnan(remaining(lengths_of(), [0])).all()
    assert np.isnan(remaining(lengths_of(10), [10, 50])).all()


def test_those_that_go_on_count_as_longer():
    # Of four, all reach 10 and one ends, of three one ends at 20, of two one ends at 30; the last goes on, and ends at one in 100 ÷ 3.
    expected = 10 + 7.5 + 5 + 100 / 3 / 4
    assert remaining(lengths_of(10, 20, 30), [0, 40], [40]) == pytest.approx([expected, 100 / 3])


def test_what_ended_early_does_not_make_all_short():
    chance = np.random.default_rng(1)
    lengths = chance.geometric(1 / 200, 1000)
    ended = lengths_of(*lengths[lengths < 100].tolist())
    assert ended.mean < 60
    (found,) = remaining(ended, [0], [100] * int((lengths >= 100).sum()))
    assert found == pytest.approx(200, rel=0.15)
