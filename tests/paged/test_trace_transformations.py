"""What each transformation does to requests that one can count, what it says it did, and what it refuses."""

import numpy as np
import pytest

from paged.errors import InvalidConfig
from paged.study.traces import Trace, excerpt_path, read_trace, superposed, synthetic


@pytest.fixture
def trace():
    return Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def test_a_window_has_those_who_arrive_in_it_and_begins_with_the_first_of_them(trace):
    window = trace.window(1, 9)
    assert window.prompt_tokens.tolist() == [20, 30]
    assert window.arrival_s.tolist() == [0, 3]
    assert trace.window(9).prompt_tokens.tolist() == [40, 50]


def test_thinning_keeps_the_share_and_a_larger_share_keeps_all_of_a_smaller_one():
    arrivals = np.arange(20_000.0)
    many = Trace.from_lengths(arrivals, np.arange(1, 20_001), np.ones(20_000, np.int64))
    some, more = many.thinned(0.3, seed=4), many.thinned(0.5, seed=4)
    assert len(some) == pytest.approx(6000, rel=0.03)
    assert set(some.prompt_tokens.tolist()) < set(more.prompt_tokens.tolist())
    assert some.prompt_tokens.tolist() != many.thinned(0.3, seed=5).prompt_tokens.tolist()[: len(some)]


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


def test_prompts_of_superposed_copies_differ_and_share_within_a_copy():
    trace = read_trace(excerpt_path("mooncake"), limit=50)
    both = superposed([trace, trace])
    originals = {tuple(trace.prompt(i)[:1]) for i in range(50)}
    firsts = {tuple(both.prompt(i)[:1]) for i in range(100)}
    assert len(firsts) == 2 * len(originals)


def test_an_output_is_said_the_same_again_and_unlike_the_prompt_and_others():
    trace = Trace.from_lengths([0, 0], [8, 8], [8, 8])
    first = trace.output(0)
    assert np.array_equal(first, trace.output(0))
    assert first.dtype == np.int32
    assert first.min() >= 0
    for other in (trace.output(1), trace.prompt(0)):
        assert not (first == other).any()


REFUSED = {
    "no request": (lambda t: t.head(0), "the number of requests wanted is 0; at least 1"),
    "more than there are": (lambda t: t.sampled(6, seed=0), "is 6; at most 5"),
    "half a request": (lambda t: t.sampled(2.5, seed=0), "is 2.5; it must be a whole number"),
    "a negative seed": (lambda t: t.sampled(2, seed=-1), "seed is -1; at least 0"),
    "no share": (lambda t: t.thinned(0, seed=0), "share is 0; it must be a positive number"),
    "a share that is no number": (lambda t: t.thinned(float("nan"), seed=0), "share is nan"),
    "more than all": (lambda t: t.thinned(1.5, seed=0), "share is 1.5; it must be at most 1"),
    "nobody left": (lambda t: t.thinned(1e-9, seed=0), "none of 5 requests"),
    "a negative time": (lambda t: t.window(-1, 5), "start_s is -1"),
    "a time that is none": (lambda t: t.window(0, float("nan")), "stop_s is nan"),
    "a window backwards": (lambda t: t.window(5, 2), "from 5 s to 2 s ends before it begins"),
    "an empty window": (lambda t: t.window(5, 8), "no request arrives from 5 s to 8 s; the last one arrives at 9 s"),
    "half of one": (lambda t: t.head(1).halves(), "is 1; at least 2"),
    "a context for a prompt alone": (lambda t: t.fitted(1), "context is 1; at least 2"),
    "another way": (lambda t: t.fitted(99, how="drop"), '"drop"; known are clip, reject'),
    "a context for nobody": (lambda t: t.fitted(5, how="reject"), "none of 5 requests fits a context of 5"),
    "a prompt that leaves no room": (lambda t: t.declared(30), "prompt of request 2 has 30 tokens; a context of 30"),
    "no cap": (lambda t: t.declared(99, 0), "cap is 0; at least 1"),
    "a rate without end": (lambda t: t.scaled(rate=1e-320), "arrival_s of request 1 is inf"),
    "lengths without end": (lambda t: t.scaled(outputs=1e308), "at most 10,000,000 are possible"),
    "no traces": (lambda t: superposed([]), "the number of traces to superpose is 0"),
    "nobody": (lambda t: Trace.from_lengths([], [], []), "the number of requests in a trace is 0|are float64"),
    "a negative prompt": (lambda t: Trace.from_lengths([0], [-5], [1]), "segment 0: -5; it must be from 1"),
    "no output": (lambda t: Trace.from_lengths([0, 1], [5, 5], [1, 0]), "request 1: 0; it must be from 1 to 10,000,000"),
    "half an output": (lambda t: Trace.from_lengths([0], [5], [1.5]), "output_tokens are float64"),
    "a negative arrival": (lambda t: Trace.from_lengths([-1], [5], [1]), "arrival_s of request 0 is -1"),
    "an arrival that is none": (lambda t: Trace.from_lengths([0, np.nan], [5, 5], [1, 1]), "request 1 is nan"),
    "not sorted": (lambda t: Trace.from_lengths([0, 3, 2], [5] * 3, [1] * 3), "request 2 arrives at 2 s, after one at 3 s"),
    "columns of two sizes": (lambda t: Trace.from_lengths([0, 3], [5, 5], [1]), r"output_tokens has the shape \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_trace_is_refused_with_value_and_limit(trace, case):
    attempt, problem = REFUSED[case]
    with pytest.raises(InvalidConfig, match=problem):
        attempt(trace)


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


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_resample_of_no_blocks_is_refused(trace, blocks):
    with pytest.raises(InvalidConfig, match="number of blocks"):
        trace.resampled(seed=0, blocks=blocks)


def test_a_trace_of_one_request_is_its_own_resample():
    one = Trace.from_lengths([5], [3], [2]).resampled(seed=1)
    assert (one.arrival_s.tolist(), one.prompt_tokens.tolist()) == ([0], [3])
