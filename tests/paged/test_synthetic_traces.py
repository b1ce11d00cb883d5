"""Made-up traces: their statistics are those that were asked for, conversations share what they should, and specs say what is wrong."""

import math

import numpy as np
import pytest

from paged.errors import InvalidSpec
from paged.study.traces import PRESETS, LogNormal, Trace, open_trace, synthetic

MANY = 200_000
ONE = "arrival_s,prompt_tokens,output_tokens\n0,3,4\n"


def cv(values):
    return float(values.std() / values.mean())


@pytest.mark.parametrize(
    ("process", "given", "expected"),
    [("poisson", None, 1.0), ("gamma", 3.0, 3.0), ("gamma", 0.5, 0.5), ("deterministic", None, 0.0)],
)
def test_gaps_between_arrivals_have_the_rate_and_the_coefficient_of_variation(process, given, expected):
    trace = synthetic(process, rate=4, cv=given, requests=MANY, prompt=1, output=1)
    gaps = np.diff(trace.arrival_s)
    assert trace.arrival_s[0] == 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.02)
    assert cv(gaps) == pytest.approx(expected, rel=0.02, abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "prompt_mean", "output_mean"),
    [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45), ("reasoning", 200, 5000)],
)
def test_the_lengths_of_a_preset_have_its_means_and_spreads(preset, prompt_mean, output_mean):
    trace = synthetic(lengths=preset, requests=MANY)
    assert trace.prompt_tokens.mean() == pytest.approx(prompt_mean, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx(output_mean, rel=0.01)
    for tokens, distribution in (
        (trace.prompt_tokens, PRESETS[preset].prompt),
        (trace.output_tokens, PRESETS[preset].output),
    ):
        assert np.median(tokens) == pytest.approx(math.exp(distribution.mu), abs=0.5 + 0.01 * np.median(tokens))
        assert np.log(tokens).std() == pytest.approx(distribution.sigma, rel=0.05)
        assert distribution.mean == pytest.approx(tokens.mean(), rel=0.01)


@pytest.mark.parametrize(("share", "tokens"), [(0.5, 60), (0.9, 220), (0.99, 900), (0.1, 20)])
def test_a_log_normal_by_mean_and_quantile_has_both(share, tokens):
    lengths = LogNormal.of_quantile(100, share=share, tokens=tokens).draw(MANY, np.random.default_rng(1))
    assert lengths.mean() == pytest.approx(100, rel=0.02)
    assert (lengths <= tokens).mean() == pytest.approx(share, abs=0.01)


def test_prompts_and_outputs_of_a_preset_do_not_depend_on_each_other_and_those_of_a_trace_come_in_pairs():
    preset = synthetic(requests=MANY)
    assert abs(np.corrcoef(np.log(preset.prompt_tokens), np.log(preset.output_tokens))[0, 1]) < 0.01
    source = Trace.from_lengths([0, 0, 0], [10, 20, 30], [1, 2, 3])
    drawn = synthetic(lengths=source, requests=30_000)
    assert np.array_equal(drawn.prompt_tokens, 10 * drawn.output_tokens)
    assert np.bincount(drawn.output_tokens)[1:] == pytest.approx([10_000] * 3, rel=0.05)


def turns_before(trace):
    """For each request the one whose output is last in its prompt, or None."""
    of_output = {int(id): i for i, id in enumerate(trace.output_ids)}
    before = []
    for i in range(len(trace)):
        ids = trace.segment_ids[trace.segment_starts[i] : trace.segment_starts[i + 1]].tolist()
        before.append(of_output[ids[-2]] if len(ids) > 2 else None)
    return before


@pytest.mark.parametrize("system_tokens", [0, 11])
def test_the_prompt_of_a_turn_is_the_prompt_and_the_output_before_it_and_something_new(system_tokens):
    trace = synthetic(requests=200, turns=4, system_tokens=system_tokens, prompt=6, output=9, think_s=3, seed=5)
    before = turns_before(trace)
    returning = [(turn, earlier) for turn, earlier in enumerate(before) if earlier is not None]
    assert len(returning) > 100
    firsts = set()
    for turn, earlier in returning:
        history = np.concatenate((trace.prompt(earlier), trace.output(earlier)))
        assert np.array_equal(trace.prompt(turn)[: len(history)], history)
        assert len(trace.prompt(turn)) == len(history) + 6
        assert trace.arrival_s[turn] >= trace.arrival_s[earlier] + 9 * 0.05 - 1e-9
    for turn, earlier in enumerate(before):
        if earlier is None:
            assert trace.prompt_tokens[turn] == system_tokens + 6
            firsts.add(tuple(trace.prompt(turn)[system_tokens:]))
    assert len(firsts) == 200 - len(returning)


def test_conversations_have_their_mean_number_of_turns_and_pauses_their_mean():
    trace = synthetic(requests=MANY, turns=4, rate=10, prompt=5, output=20, think_s=30, token_s=0.1, seed=2)
    num_segments = np.diff(trace.segment_starts)
    num_conversations = int((num_segments == 1).sum())
    assert len(trace) == MANY
    assert MANY / num_conversations == pytest.approx(4, rel=0.02)
    # Geometric: of all conversations (3/4)^k have more than k turns.
    for k in (1, 2, 5):
        assert (num_segments == 2 * k + 1).sum() / num_conversations == pytest.approx(0.75**k, rel=0.03)
    begins = trace.arrival_s[num_segments == 1]
    assert np.diff(begins).mean() == pytest.approx(4 / 10, rel=0.02)
    arrival_of_output = np.empty(2 * MANY)
    arrival_of_output[trace.output_ids] = trace.arrival_s
    returns = np.flatnonzero(num_segments > 1)
    last_outputs = trace.segment_ids[trace.segment_starts[returns + 1] - 2]
    pauses = trace.arrival_s[returns] - arrival_of_output[last_outputs]
    assert pauses.mean() == pytest.approx(30 + 20 * 0.1, rel=0.02)
    assert cv(pauses - 2) == pytest.approx(1, rel=0.02)


def test_lengths_come_from_a_file_too(tmp_path):
    (tmp_path / "mine").write_text(ONE)
    assert set(open_trace(f"synthetic:poisson,lengths={tmp_path / 'mine'}").output_tokens.tolist()) == {4}


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "synthetic:poisson").write_text(ONE)
    assert len(open_trace("synthetic:poisson")) == 1


def test_a_wrong_spec_is_known_with_its_wrong_part_and_a_name_that_leads_nowhere_says_what_is_known():
    with pytest.raises(InvalidSpec) as caught:
        open_trace("synthetic:poisson,rat=2")
    assert (caught.value.spec, caught.value.part) == ("synthetic:poisson,rat=2", "rat=2")
    with pytest.raises(FileNotFoundError, match='azure, mooncake.*synthetic.*did you mean "azure"'):
        open_trace("azur")
