"""How long steps take, as it is learnt: what is between them counts while there is work, and idle time does not."""

import pytest

from paged.serving.pace import Pace


def noted(steps, between=0.0, rests=False):
    """A pace after steps of (tokens, seconds), with so many seconds between them."""
    pace, now = Pace(), 100.0
    for tokens, seconds in steps:
        pace.note(tokens, now, now + seconds)
        now += seconds + between
        if rests:
            pace.rest()
    return pace


STEPS = [(tokens, 0.002 + 0.001 * tokens) for tokens in (1, 5, 9, 2, 40, 3) * 20]


def test_a_step_and_a_token_have_their_seconds():
    assert noted(STEPS).coefficients() == pytest.approx((0.002, 0.001))
    assert noted(STEPS).seconds(10, 100) == pytest.approx(0.12)


def test_what_is_done_between_steps_is_waited_for_too():
    # All but the very first.
    assert noted(STEPS, between=0.003).coefficients() == pytest.approx((0.005, 0.001), rel=0.02)


def test_time_with_nothing_to_do_is_nobodys():
    assert noted(STEPS, between=5.0, rests=True).coefficients() == pytest.approx((0.002, 0.001))


def test_steps_that_computed_nothing_say_nothing():
    assert noted([(0, 3.0)]).coefficients() == (0.0, 0.0)


def test_steps_that_are_all_alike_tell_the_seconds_of_their_tokens():
    assert noted([(8, 0.016)] * 9).coefficients() == pytest.approx((0.0, 0.002))
