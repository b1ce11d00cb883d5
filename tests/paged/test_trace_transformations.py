"""What each transformation does to requests that one can count, what it says it did, and what it refuses."""

import numpy as np
import pytest

from paged.study.traces import Trace, superposed, synthetic


@pytest.fixture
def trace():
    return Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def test_a_window_has_those_who_arrive_in_it_and_begins_with_the_first_of_them(trace):
    window = trace.window(1, 9)
    assert (window.prompt_tokens.tolist(), window.arrival_s.tolist()) == ([20, 30], [0, 3])
    assert trace.window(9).prompt_tokens.tolist() == [40, 50]


def test_the_longer_part_of_a_request_that_is_too_long_gives():
    trace = Trace.from_lengths([0, 0, 0, 0], [90, 10, 80, 60], [20, 200, 80, 40])
    clipped = trace.fitted(100)
    assert clipped.prompt_tokens.tolist() == [80, 10, 50, 60]
    assert clipped.output_tokens.tolist() == [20, 90, 50, 40]
    assert str(clipped.applied[-1]) == "fitted(context=100, how=clip): 4 of 4 requests, 3 clipped"
    rejected = trace.fitted(100, how="reject")
    assert rejected.prompt_tokens.tolist() == [60]
    assert str(rejected.applied[-1]) == "fitted(context=100, how=reject): 1 of 4 requests, 3 rejected"


def test_a_declared_maximum_is_the_cap_or_what_the_prompt_leaves_and_exact_lengths_stay_beside_it():
    trace = Trace.from_lengths([0, 0, 0], [100, 3900, 5], [300, 20, 1500]).declared(4096)
    assert trace.max_tokens.tolist() == [1024, 196, 1024]
    assert trace.output_tokens.tolist() == [300, 20, 1024]
    assert trace.applied[-1].counts == {"clipped": 1}


def test_scaling_outputs_scales_what_was_declared_and_leaves_undeclared_what_was_not():
    trace = Trace.from_lengths([0], [10], [100])
    assert trace.scaled(outputs=0.5).max_tokens.tolist() == [0]
    assert trace.declared(4096, 200).scaled(outputs=0.5).max_tokens.tolist() == [100]


def test_a_report_can_say_what_was_applied_and_in_which_order(trace):
    changed = trace.scaled(rate=2, prompts=0.5).thinned(0.9, seed=1).window(0, 4)
    assert [step.name for step in changed.applied] == ["stretched", "lengths", "thinned", "window"]
    assert changed.applied[0].arguments == {"rate": 2}
    assert str(changed.applied[0]) == "stretched(rate=2): 5 of 5 requests"
    assert trace.scaled().applied == trace.applied == ()


def test_superposing_a_trace_on_itself_doubles_its_rate_and_not_each_moment():
    trace = synthetic("deterministic", rate=1, requests=1000, prompt=5, output=5)
    at_once = superposed([trace, trace])
    assert at_once.arrival_s[:4].tolist() == [0, 0, 1, 1]
    turned = superposed([trace, trace], seed=3)
    gaps = np.diff(turned.arrival_s)
    assert gaps[::2] == pytest.approx(np.full(1000, gaps[0]))
    assert 0.01 < gaps[0] < 0.99
    assert turned.arrival_s[-1] < 1000
    assert str(turned.applied[-1]) == "superposed(traces=2, seed=3): 2,000 of 1,000 requests"


def test_an_output_is_said_the_same_again_and_unlike_the_prompt_and_others():
    trace = Trace.from_lengths([0, 0], [8, 8], [8, 8])
    first = trace.output(0)
    assert np.array_equal(first, trace.output(0))
    assert first.dtype == np.int32
    assert first.min() >= 0
    for other in (trace.output(1), trace.prompt(0)):
        assert not (first == other).any()


def test_a_resample_is_made_of_blocks_of_neighbours_with_the_gaps_between_them():
    arrivals = np.cumsum(np.arange(100.0))
    trace = Trace.from_lengths(arrivals, np.arange(1, 101), np.arange(201, 301))
    drawn = trace.resampled(seed=1)
    assert len(drawn) == 100
    assert str(drawn.applied[-1]) == "resampled(seed=1, block=5): 100 of 100 requests"
    numbers = drawn.prompt_tokens - 1
    assert (drawn.output_tokens == numbers + 201).all()
    blocks = numbers.reshape(20, 5)
    assert (np.diff(blocks, axis=1) % 100 == 1).all()
    # The gap before request i is i seconds; before the first, the mean of all.
    gaps = np.where(numbers == 0, arrivals[-1] / 99, numbers)
    assert np.diff(drawn.arrival_s) == pytest.approx(gaps[1:])
    assert len(set(blocks[:, 0].tolist())) > 10


def test_resamples_of_one_seed_are_the_same_and_of_another_are_not(trace):
    assert len(trace.resampled(seed=3, requests=250)) == 250
    same = [trace.resampled(seed=3).prompt_tokens.tolist() for _ in range(2)]
    assert same[0] == same[1]
    assert len({tuple(trace.resampled(seed=seed).prompt_tokens.tolist()) for seed in range(9)}) > 4


def test_a_request_that_is_drawn_twice_does_not_find_itself_in_a_cache():
    trace = synthetic("poisson", requests=40, turns=4, system_tokens=8, seed=1)
    drawn = trace.resampled(seed=2)
    prompts = [drawn.prompt(request).tobytes() for request in range(len(drawn))]
    lengths = drawn.prompt_tokens.tolist()
    assert len(set(lengths)) < len(lengths)
    assert len(set(prompts)) == len(prompts)
    # Turns of a conversation that were drawn once still share what they shared.
    shared = np.unique(drawn.segment_ids, return_counts=True)[1]
    assert (shared > 1).sum() > 10


def test_a_trace_of_one_request_is_its_own_resample():
    one = Trace.from_lengths([5], [3], [2]).resampled(seed=1)
    assert (one.arrival_s.tolist(), one.prompt_tokens.tolist()) == ([0], [3])
