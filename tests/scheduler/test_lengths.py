"""Means of output lengths: of those that ended, and of what is still to come."""

from __future__ import annotations

import numpy as np
import pytest

from paged.scheduler.lengths import WINDOW, OutputLengths

NONE = np.empty(0, np.int64)


def lengths_of(*noted, assumed=0):
    lengths = OutputLengths(1000, assumed)
    for length in noted:
        lengths.note(length)
    return lengths


def remaining(lengths, written, going=NONE):
    return lengths.mean_remaining(np.array(written), np.array(going, np.int64)).tolist()


def test_the_mean_leaves_assumed_lengths_and_the_cap_out():
    assert lengths_of(assumed=64).mean is None
    assert lengths_of(10, 20, assumed=64).mean == 15


def test_the_mean_forgets_what_left_the_window():
    assert lengths_of(*[5] * 300, *[7] * WINDOW).mean == 7
    assert lengths_of(*[5] * WINDOW, *[7] * (WINDOW // 2)).mean == 6


def test_a_sequence_goes_on_as_those_did_that_were_longer():
    assert remaining(lengths_of(10, 20, 30), [0, 9, 10, 15, 29]) == pytest.approx([20, 11, 15, 10, 1])


def test_nothing_is_said_where_none_that_was_longer_is_known():
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
