"""Traces, read and made up: what columns become, laws of transformations, and statistics that were asked for."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import paged.study.traces as all_of_traces
from paged.errors import InvalidConfig, InvalidSpec
from paged.study.traces import (
    NOT_DECLARED,
    PRESETS,
    LogNormal,
    Trace,
    open_trace,
    read_trace,
    save_trace,
    superposed,
    synthetic,
)

from .files_of_others import assert_by_hand, by_hand_in, offered  # noqa: TID252

COLUMNS = (
    "arrival_s", "output_tokens", "segment_starts", "segment_ids", "segment_lengths", "max_tokens", "priority",
    "tenant", "output_ids",
)  # fmt: skip
BY_REQUEST = ("output_tokens", "max_tokens", "priority", "tenant", "output_ids", "prompt_tokens")

ids = st.sampled_from([-1, -1, 0, 1, 2, 7, 2**30 - 1])
segments = st.lists(st.tuples(ids, st.integers(1, 40)), min_size=1, max_size=4)
names = st.sampled_from(["", "acme", 'µ, "quoted"', "0", "-1", "null"])
requests = st.tuples(
    st.floats(0, 1e6), st.integers(1, 30), segments, st.none() | st.integers(0, 9),
    st.sampled_from([0, 0, -3, 5, 2**31 - 1]), names, ids,
)  # fmt: skip


@st.composite
def traces(draw):
    rows = draw(st.lists(requests, min_size=1, max_size=8))
    gaps, outputs, prompts, slacks, priorities, tenants, output_ids = zip(*rows, strict=True)
    arrival_s = np.cumsum(gaps) - gaps[0]
    flat = [segment for prompt in prompts for segment in prompt]
    declared = [NOT_DECLARED if slack is None else out + slack for out, slack in zip(outputs, slacks, strict=True)]
    return Trace(
        name="drawn", arrival_s=arrival_s, output_tokens=np.array(outputs, np.int64),
        segment_starts=np.cumsum([0, *map(len, prompts)]),
        segment_ids=np.array([content for content, _ in flat], np.int64),
        segment_lengths=np.array([length for _, length in flat], np.int64), max_tokens=np.array(declared, np.int64),
        priority=np.array(priorities, np.int64), tenant=np.array(tenants, np.str_),
        output_ids=np.array(output_ids, np.int64), seed=draw(st.integers(0, 3)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "trace"


def segments_of(trace, request):
    place = slice(trace.segment_starts[request], trace.segment_starts[request + 1])
    return list(zip(trace.segment_ids[place].tolist(), trace.segment_lengths[place].tolist(), strict=True))


def assert_same_requests(part, whole, chosen):
    """`part` has the requests `chosen` of `whole`, and the times between them."""
    assert len(part) == len(chosen)
    assert part.arrival_s == pytest.approx(whole.arrival_s[chosen] - whole.arrival_s[chosen[0]])
    for column in BY_REQUEST:
        assert np.array_equal(getattr(part, column), getattr(whole, column)[chosen]), column
    assert [segments_of(part, i) for i in range(len(part))] == [segments_of(whole, i) for i in chosen]


@given(traces())
def test_a_saved_trace_comes_back_exactly(path, trace):
    save_trace(trace, path)
    back = read_trace(path, seed=trace.seed)
    for column in COLUMNS:
        assert np.array_equal(getattr(back, column), getattr(trace, column)), column
    for request in range(len(trace)):
        assert np.array_equal(back.prompt(request), trace.prompt(request))


def test_a_request_that_says_nothing_special_is_a_short_line(path):
    save_trace(Trace.from_lengths([0.0, 1.5], [3, 4], [5, 6]), path)
    assert json.loads(path.read_text().splitlines()[1]) == {"arrival_s": 1.5, "prompt_tokens": 4, "output_tokens": 6}


@given(traces(), st.floats(0.05, 1), st.integers(0, 5), st.data())
def test_a_subset_keeps_its_requests_whole_and_in_order(trace, share, seed, data):
    count = data.draw(st.integers(1, len(trace)))
    sample = trace.sampled(count, seed=seed)
    kept = np.sort(np.random.default_rng(seed).spawn(1)[0].choice(len(trace), count, replace=False))
    assert_same_requests(sample, trace, kept)
    drawn = np.random.default_rng(seed).spawn(1)[0].random(len(trace)) < share
    if drawn.any():
        assert_same_requests(trace.thinned(share, seed=seed), trace, np.flatnonzero(drawn))
    assert_same_requests(trace.head(count), trace, np.arange(count))
    for replica in range(count):
        assert_same_requests(trace.dealt(replica, count), trace, np.arange(replica, len(trace), count))
    if len(trace) > 1:
        middle = len(trace) // 2
        first, second = trace.halves()
        assert_same_requests(first, trace, np.arange(middle))
        assert_same_requests(second, trace, np.arange(middle, len(trace)))


@given(traces(), st.integers(2, 80))
def test_after_fitting_every_request_fits_and_those_that_did_are_as_they_were(trace, context):
    fits = trace.prompt_tokens + trace.output_tokens <= context
    clipped = trace.fitted(context)
    assert clipped.applied[-1].counts == {"clipped": int((~fits).sum())}
    assert (clipped.prompt_tokens + clipped.output_tokens <= context).all()
    assert (clipped.prompt_tokens + clipped.max_tokens <= context).all()
    assert np.array_equal(clipped.arrival_s, trace.arrival_s)
    for request in range(len(trace)):
        length = int(clipped.prompt_tokens[request])
        assert np.array_equal(clipped.prompt(request), trace.prompt(request)[:length])
        if fits[request]:
            assert length == trace.prompt_tokens[request]
            assert clipped.output_tokens[request] == trace.output_tokens[request]
        else:
            # Whatever gives, the context is full or half of it is the prompt's.
            assert length + clipped.output_tokens[request] == context
    if fits.any():
        rest = trace.fitted(context, how="reject")
        assert rest.applied[-1].counts == {"rejected": int((~fits).sum())}
        assert np.array_equal(rest.prompt_tokens, trace.prompt_tokens[fits])
        assert (rest.prompt_tokens + rest.max_tokens <= context).all()


@given(traces(), st.integers(1, 40), st.integers(1, 40))
def test_after_declaring_no_output_is_longer_than_declared_and_nothing_longer_than_the_context(trace, cap, room):
    context = int(trace.prompt_tokens.max()) + room
    declared = trace.declared(context, cap)
    said_nothing = trace.max_tokens == NOT_DECLARED
    room = context - trace.prompt_tokens
    assert np.array_equal(declared.max_tokens, np.minimum(np.where(said_nothing, cap, trace.max_tokens), room))
    assert np.array_equal(declared.output_tokens, np.minimum(trace.output_tokens, declared.max_tokens))
    num_clipped = int((declared.output_tokens < trace.output_tokens).sum())
    assert declared.applied[-1].counts == {"clipped": num_clipped}


def contents_of(trace, number=None):
    """Each request's segments and output as (content, tokens); a content is an id, or an id of trace `number`."""
    return [
        (
            [(None if id < 0 else (number, id), tokens) for id, tokens in segments_of(trace, i)],
            (None if trace.output_ids[i] < 0 else (number, int(trace.output_ids[i])), int(trace.output_tokens[i])),
        )
        for i in range(len(trace))
    ]


@given(st.lists(traces(), min_size=1, max_size=3))
def test_superposed_traces_keep_what_they_share_and_share_nothing_with_each_other(several):
    together = superposed(several)
    arrivals = np.concatenate([trace.arrival_s for trace in several])
    order = np.argsort(arrivals, kind="stable")
    assert np.array_equal(together.arrival_s, arrivals[order])
    apart = [request for number, trace in enumerate(several) for request in contents_of(trace, number)]
    renamed = {}
    for (segments, output), place in zip(contents_of(together), order.tolist(), strict=True):
        old_segments, old_output = apart[place]
        for (new, tokens), (old, old_tokens) in zip([*segments, output], [*old_segments, old_output], strict=True):
            assert (tokens, renamed.setdefault(old, new)) == (old_tokens, new)
    assert len(set(renamed.values())) == len(renamed)


def test_a_resample_is_made_of_blocks_of_neighbours_with_the_gaps_between_them():
    arrivals = np.cumsum(np.arange(100.0))
    trace = Trace.from_lengths(arrivals, np.arange(1, 101), np.arange(201, 301))
    drawn = trace.resampled(seed=4)
    assert (len(drawn), str(drawn.applied[-1])) == (100, "resampled(seed=4, block=5): 100 of 100 requests")
    numbers = drawn.prompt_tokens - 1
    assert (drawn.output_tokens == numbers + 201).all()
    blocks = numbers.reshape(20, 5)
    assert (np.diff(blocks, axis=1) % 100 == 1).all()
    # Behind the last request comes the first.
    assert (np.diff(blocks, axis=1) < 0).any()
    # The gap before request i is i seconds; before the first, the mean of all.
    gaps = np.where(numbers == 0, arrivals[-1] / 99, numbers)
    assert np.diff(drawn.arrival_s) == pytest.approx(gaps[1:])
    assert len(set(blocks[:, 0].tolist())) > 10


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
    one = Trace.from_lengths([5], [3], [2]).resampled(seed=1)
    assert (one.arrival_s.tolist(), one.prompt_tokens.tolist()) == ([0], [3])


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}\n'
ROW = {"arrival_s": 0, "output_tokens": 4, "segments": [[7, 6], [None, 2]]}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_tenant_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path):
    trace = replace(Trace.from_lengths([0], [3], [5]), tenant=np.array([" "]))
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InvalidConfig, match=r"tenant ' ' is no name"):
        save_trace(trace, path)
    assert not path.exists()


TWO_OF_AZURE = AZURE + "2023-11-16 18:15:46,20,1\n2023-11-16 18:15:47,20,1\n"
LONGER = '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [7, 4, 9]}\n'
SHARED = '{"timestamp": 3000, "input_length": 1030, "output_length": 1, "hash_ids": [4, 9, 5]}\n'
OURS = [
    {"arrival_s": 0.5, "prompt_tokens": 30, "output_tokens": 4, "prefix_id": "bot", "prefix_tokens": 20},
    {"arrival_s": 2.0, "prompt_tokens": 50, "output_tokens": 5, "prefix_id": "bot", "prefix_tokens": 25},
    {"arrival_s": 2.0, "prompt_tokens": 9, "output_tokens": 1, "prefix_id": None, "prefix_tokens": None},
]
ONE, FOUR = (Trace.from_lengths(*each) for each in (([0], [10], [100]), ([0] * 4, [90, 10, 80, 60], [20, 200, 80, 40])))
QUANTILES = ((0.5, 60), (0.9, 220), (0.99, 900), (0.1, 20))
TWINS = Trace.from_lengths([0, 0], [8, 8], [8, 8])
EVEN = synthetic("deterministic", rate=1, requests=1000, prompt=5, output=5)
TURNED = superposed([EVEN, EVEN], seed=3)
FIVE = Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def as_csv(rows):
    return "\n".join(
        ",".join("" if cell is None else str(cell) for cell in row)
        for row in [rows[0], *(each.values() for each in rows)]
    )


def columns(trace):
    return columns_of(trace, "arrival_s prompt_tokens output_tokens segment_ids output_ids")


def columns_of(trace, names):
    return [getattr(trace, name).tolist() for name in names.split()]


def lengths_of(trace):
    return trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()


def quantile(share, tokens):
    """Lengths of mean 100 of which this share is at most so many tokens."""
    return LogNormal.of_quantile(100, share=share, tokens=tokens).draw(MANY, np.random.default_rng(1))


def same(trace, first, its, second, others):
    """The share of equal tokens in these places of two prompts."""
    return float((trace.prompt(first)[its] == trace.prompt(second)[others]).mean())


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("traces.txt"))
def test_a_trace_is_what_it_is_by_hand(tmp_path, call, by_hand):
    def read(text, **options):
        (tmp_path / "trace").write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(tmp_path / "trace", **options)

    assert_by_hand(call, by_hand, offered(all_of_traces) | globals() | {"read": read})


MANY = 200_000


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
    by = PRESETS[preset]
    for tokens, distribution in ((trace.prompt_tokens, by.prompt), (trace.output_tokens, by.output)):
        assert np.median(tokens) == pytest.approx(math.exp(distribution.mu), abs=0.5 + 0.01 * np.median(tokens))
        assert np.log(tokens).std() == pytest.approx(distribution.sigma, rel=0.05)
        assert distribution.mean == pytest.approx(tokens.mean(), rel=0.01)


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


def test_lengths_come_from_a_file_too_and_a_file_of_a_specs_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "synthetic:poisson"):
        (tmp_path / name).write_text("arrival_s,prompt_tokens,output_tokens\n0,3,4\n")
    assert set(open_trace("synthetic:poisson,lengths=mine").output_tokens.tolist()) == {4}
    assert len(open_trace("synthetic:poisson")) == 1


def test_a_wrong_spec_is_known_with_its_wrong_part_and_a_name_that_leads_nowhere_says_what_is_known():
    with pytest.raises(InvalidSpec) as caught:
        open_trace("synthetic:poisson,rat=2")
    assert (caught.value.spec, caught.value.part) == ("synthetic:poisson,rat=2", "rat=2")
    with pytest.raises(FileNotFoundError, match='azure, mooncake.*synthetic.*did you mean "azure"'):
        open_trace("azur")
