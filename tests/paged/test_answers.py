"""The stand-in's outputs: those of the trace, whoever asks for which tokens in which order, in as many rows as are being answered."""

import numpy as np
from hypothesis import given, strategies as st

from paged.study.simulator.answers import Answers
from paged.study.traces import Trace

LENGTHS = [3, 40, 1, 7, 19, 2, 90, 5, 11, 4, 8, 6]
TRACE = Trace.from_lengths(np.zeros(len(LENGTHS)), [4] * len(LENGTHS), LENGTHS)


@given(st.lists(st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1), max_size=8), st.data())
def test_tokens_are_those_of_the_outputs_whoever_was_forgotten_before(steps, data):
    answers = Answers(TRACE)
    for chosen in steps:
        requests = np.array(sorted(chosen))
        places = np.array([data.draw(st.integers(0, LENGTHS[request] - 1)) for request in requests])
        expected = [int(TRACE.output(request)[place]) for request, place in zip(requests, places, strict=True)]
        answers.begin(requests.tolist())
        assert answers.tokens(requests, places).tolist() == expected
        answers.forget(data.draw(st.lists(st.sampled_from(range(len(LENGTHS))), unique=True)))


def test_tokens_of_a_stretch_come_a_row_for_each_request():
    answers = Answers(TRACE)
    answers.begin([1, 6])
    found = answers.tokens(np.array([6, 1]), np.array([[80, 81, 82], [0, 1, 2]]))
    assert found.tolist() == [TRACE.output(6)[80:83].tolist(), TRACE.output(1)[:3].tolist()]
