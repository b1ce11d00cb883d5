"""The search by itself, against oracles that are no simulation: what it returns is where the oracle changes, and it asks little."""

import math

from hypothesis import given, strategies as st

from paged.study.simulator.search import REACH, Counts, Rates, search


def found(axis, meets):
    """What the search returns, and what it tried, in order."""
    tried, tries = {}, search(axis)
    try:
        value = next(tries)
        while True:
            assert value not in tried
            tried[value] = meets(value)
            value = tries.send(tried[value])
    except StopIteration as end:
        return *end.value, tried


@st.composite
def counts(draw, **options):
    fewest = draw(st.integers(1, 50))
    most = draw(st.integers(fewest, fewest + 5000))
    return Counts(draw(st.integers(fewest, most)), fewest, most, **options)


@given(counts(), st.data())
def test_the_fewest_of_a_monotone_outcome_is_found_exactly(axis, data):
    enough = data.draw(st.integers(axis.fewest, axis.most + 1))
    answer, missed, tried = found(axis, lambda count: count >= enough)
    assert answer == (enough if enough <= axis.most else None)
    if answer is not None:
        assert missed == (answer - 1 if answer > axis.fewest else None)
    # A third of the bracket is left at best, two thirds at worst; close to the end one count less.
    assert len(tried) <= math.log(axis.most, 2) + math.log(axis.most, 1.5) + 5


@given(st.floats(0.01, 100), st.floats(1 / REACH, REACH), st.sampled_from([0.02, 0.3]))
def test_the_highest_rate_of_a_monotone_outcome_is_found_within_the_tolerance(start, share, tolerance):
    highest = start * share
    answer, missed, _ = found(Rates(start, tolerance), lambda rate: rate <= highest)
    # Powers of two reach one step less than the end in either direction.
    assert answer is not None or share < 2 / REACH
    if answer is not None:
        assert answer <= highest
        assert missed is not None or answer > start * REACH / 2
        assert missed is None or highest < missed <= answer * (1 + tolerance)


@given(st.floats(0.01, 100), st.randoms(use_true_random=False))
def test_whatever_the_outcome_all_lower_rates_that_were_tried_met_and_all_higher_ones_missed(start, random):
    answer, missed, tried = found(Rates(start, 0.02), lambda rate: random.random() < 0.5)
    if answer is None:
        assert not any(tried.values())
        return
    assert all(met == (rate <= answer) for rate, met in tried.items())
    higher = [rate for rate in tried if rate > answer]
    assert missed == (min(higher) if higher else None)


@given(counts(turns=True), st.randoms(use_true_random=False))
def test_whatever_the_outcome_the_answer_met_and_the_nearest_fewer_that_was_tried_missed(axis, random):
    answer, missed, tried = found(axis, lambda count: random.random() < 0.3)
    if answer is None:
        assert not any(tried.values())
        assert {axis.fewest, axis.most} <= set(tried)
        return
    fewer = [count for count in tried if count < answer]
    assert tried[answer]
    assert not any(tried[count] for count in fewer)
    assert missed == (max(fewer) if fewer else None)


@given(st.integers(1, 500), st.integers(2, 4), st.integers(1, 3000))
def test_where_more_does_not_help_less_is_tried_down_to_the_fewest_that_meet(low, width, above):
    # A band that is as wide as a step cannot be stepped over.
    high = low * width
    axis = Counts(high + above, 1, 10_000, turns=True)
    answer, missed, tried = found(axis, lambda count: low <= count <= high)
    assert (answer, missed) == (low, low - 1 if low > 1 else None)
    assert tried[10_000] is False


def test_without_turning_fewer_are_not_tried_where_more_do_not_meet():
    answer, missed, tried = found(Counts(8, 1, 100), lambda count: False)
    assert (answer, missed, list(tried)) == (None, 100, [8, 16, 32, 64, 100])


def test_rates_are_given_up_a_thousand_times_away_from_where_the_search_began():
    assert found(Rates(1.0, 0.02), lambda rate: True)[:2] == (1024.0, None)
    assert found(Rates(1.0, 0.02), lambda rate: False)[:2] == (None, 1 / 1024)


def test_a_tolerance_finer_than_the_figures_of_a_rate_ends_all_the_same():
    answer, missed, tried = found(Rates(1.0, 1e-9), lambda rate: rate <= math.pi / 2)
    assert (answer, missed) == (1.57079, 1.5708)
    assert len(tried) < 30
