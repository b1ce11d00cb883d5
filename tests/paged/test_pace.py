"""How long steps take, as it is learnt: what is between them counts while there is work, and idle time does not."""

import pytest

from paged.engine.pace import Pace


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
    assert noted(STEPS).seconds(10, 100) == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("steps", "more", "found"),
    [
        (STEPS, {}, (0.002, 0.001)),
        # What is done between steps is waited for too, all but the very first; time with nothing to do is nobody's.
        (STEPS, {"between": 0.003}, (0.005, 0.001)),
        (STEPS, {"between": 5.0, "rests": True}, (0.002, 0.001)),
        # Steps that computed nothing say nothing, and steps that are all alike the seconds of their tokens.
        ([(0, 3.0)], {}, (0.0, 0.0)),
        ([(8, 0.016)] * 9, {}, (0.0, 0.002)),
    ],
)
def test_seconds_of_a_step_and_of_a_token_are_told_apart(steps, more, found):
    assert noted(steps, **more).coefficients() == pytest.approx(found, rel=0.02 if "between" in more else 1e-6)
