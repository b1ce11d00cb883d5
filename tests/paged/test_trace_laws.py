"""Traces: what each format's columns become, and what holds for every trace and each transformation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.errors import InvalidConfig
from paged.study.traces import (
    EXCERPTS,
    NOT_DECLARED,
    Trace,
    excerpt_path,
    read_trace,
    save_trace,
    superposed,
    synthetic,
)

COLUMNS = (
    "arrival_s", "output_tokens", "segment_starts", "segment_ids", "segment_lengths", "max_tokens", "priority",
    "tenant", "output_ids",
)  # fmt: skip
BY_REQUEST = ("output_tokens", "max_tokens", "priority", "tenant", "output_ids", "prompt_tokens")

ids = st.sampled_from([-1, -1, 0, 1, 2, 7, 2**30 - 1])
segments = st.lists(st.tuples(ids, st.integers(1, 40)), min_size=1, max_size=4)
names = st.sampled_from(["", "acme", 'µ, "quoted"', "0", "-1", "null"])
requests = st.tuples(
    st.floats(0, 1e6),
    st.integers(1, 30),
    segments,
    st.none() | st.integers(0, 9),
    st.sampled_from([0, 0, -3, 5, 2**31 - 1]),
    names,
    ids,
)


@st.composite
def traces(draw):
    rows = draw(st.lists(requests, min_size=1, max_size=8))
    gaps, outputs, prompts, slacks, priorities, tenants, output_ids = zip(*rows, strict=True)
    arrival_s = np.cumsum(gaps) - gaps[0]
    flat = [segment for prompt in prompts for segment in prompt]
    declared = [NOT_DECLARED if slack is None else out + slack for out, slack in zip(outputs, slacks, strict=True)]
    return Trace(
        name="drawn",
        arrival_s=arrival_s,
        output_tokens=np.array(outputs, np.int64),
        segment_starts=np.cumsum([0, *map(len, prompts)]),
        segment_ids=np.array([content for content, _ in flat], np.int64),
        segment_lengths=np.array([length for _, length in flat], np.int64),
        max_tokens=np.array(declared, np.int64),
        priority=np.array(priorities, np.int64),
        tenant=np.array(tenants, np.str_),
        output_ids=np.array(output_ids, np.int64),
        seed=draw(st.integers(0, 3)),
    )


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


@pytest.fixture
def trace():
    return Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def test_the_longer_part_of_a_request_that_is_too_long_gives():
    trace = Trace.from_lengths([0, 0, 0, 0], [90, 10, 80, 60], [20, 200, 80, 40])
    clipped = trace.fitted(100)
    assert clipped.prompt_tokens.tolist() == [80, 10, 50, 60]
    assert clipped.output_tokens.tolist() == [20, 90, 50, 40]
    assert str(clipped.applied[-1]) == "fitted(context=100, how=clip): 4 of 4 requests, 3 clipped"
    rejected = trace.fitted(100, how="reject")
    assert rejected.prompt_tokens.tolist() == [60]
    assert str(rejected.applied[-1]) == "fitted(context=100, how=reject): 1 of 4 requests, 3 rejected"


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
PLAIN = "arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"


@pytest.fixture
def trace_of(tmp_path):
    def read(text, **options):
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(path, **options)

    return read


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "arrival_s", "prompts", "outputs"),
    [
        # Times count from the first request, in whatever zone they are.
        (AZURE + "2023-11-16 18:15:46.68059,374,44\n2023-11-16 18:15:50.18059,9,10\n", [0, 3.5], [374, 9], [44, 10]),
        (AZURE + "2024-05-10 00:00:00+00:00,5,6\n2024-05-10 02:00:01+02:00,5,6\n", [0, 1], [5, 5], [6, 6]),
        # Columns come in any order, and unknown ones are ignored.
        ("output_tokens, region ,arrival_s,prompt_tokens\n3,eu,1,8\n\n4,us,2,9\n", [0, 1], [8, 9], [3, 4]),
        # As Windows writes it, with a byte order mark.
        (b"\xef\xbb\xbf" + AZURE[:-1].encode() + b"\r\n2023-11-16 18:15:46,20,1\r\n", [0], [20], [1]),
    ],
)
def test_a_table_becomes_arrivals_and_lengths(trace_of, text, arrival_s, prompts, outputs):
    trace = trace_of(text)
    assert trace.arrival_s == pytest.approx(arrival_s)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (prompts, outputs)


def test_azure_prompts_differ_from_their_first_token_on_and_depend_on_the_seed(trace_of):
    text = AZURE + "2023-11-16 18:15:46,20,1\n2023-11-16 18:15:47,20,1\n"
    first, second = (trace_of(text).prompt(i) for i in (0, 1))
    assert first[0] != second[0]
    assert np.array_equal(first, trace_of(text).prompt(0))
    assert not np.array_equal(first, trace_of(text, seed=1).prompt(0))


def test_mooncake_milliseconds_are_seconds_and_the_last_id_is_what_is_left(trace_of):
    trace = trace_of(MOONCAKE + MOONCAKE.replace(": 0", ": 1500"))
    assert (trace.arrival_s.tolist(), trace.prompt_tokens.tolist()) == ([0.0, 1.5], [600, 600])
    assert trace.segment_lengths.tolist() == [512, 88, 512, 88]


def test_equal_hash_ids_are_equal_tokens_wherever_they_stand_and_however_long_they_are(trace_of):
    other = '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [7, 4, 9]}\n'
    trace = trace_of(MOONCAKE + other)
    first, second = trace.prompt(0), trace.prompt(1)
    assert np.array_equal(first[:512], second[512:1024])
    assert np.array_equal(first[512 : 512 + 76], second[1024:])
    one = {"timestamp": 0, "input_length": 1, "output_length": 1}
    trace = trace_of(lines(*(one | {"hash_ids": [id]} for id in (0, 1, 2**30 - 1))))
    assert len({int(trace.prompt(i)[0]) for i in range(3)}) == 3


def test_our_own_csv_and_json_lines_are_the_same_trace(trace_of):
    columns = PLAIN.strip().split(",")
    rows = [[0.5, 30, 4, "bot", 20], [2.0, 50, 5, "bot", 25], [2.0, 9, 1, None, None]]
    as_csv = trace_of(PLAIN + "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows))
    as_json = trace_of("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    for i in range(3):
        assert np.array_equal(as_csv.prompt(i), as_json.prompt(i))
    assert as_csv.arrival_s.tolist() == as_json.arrival_s.tolist() == [0.0, 1.5, 1.5]
    shared = np.equal(as_csv.prompt(0), as_csv.prompt(1)[:30])
    assert shared[:20].all()
    assert not shared[20]


def test_a_limit_reads_no_further(trace_of):
    assert len(trace_of(MOONCAKE + MOONCAKE + "damaged", limit=2)) == 2


def test_scaling_keeps_what_was_shared_and_leaves_no_length_at_zero(trace_of):
    other = '{"timestamp": 3000, "input_length": 1030, "output_length": 1, "hash_ids": [4, 9, 5]}\n'
    scaled = trace_of(MOONCAKE + other).scaled(rate=2, prompts=1 / 32, outputs=1 / 8)
    assert (scaled.arrival_s.tolist(), scaled.segment_lengths.tolist()) == ([0.0, 1.5], [16, 3, 16, 16, 1])
    assert scaled.output_tokens.tolist() == [1, 1]
    assert np.array_equal(scaled.prompt(0)[:19], scaled.prompt(1)[:19])


@pytest.mark.parametrize("name", sorted(EXCERPTS))
def test_every_excerpt_is_small_and_can_be_read(name):
    path = excerpt_path(name)
    assert path.stat().st_size < 100_000
    assert len(read_trace(path)) >= 300


def test_segments_with_one_id_are_the_same_tokens_wherever_they_stand(trace_of):
    trace = trace_of(lines(ROW, ROW | {"segments": [[3, 5], [7, 9]]}))
    assert trace.prompt_tokens.tolist() == [8, 14]
    assert np.array_equal(trace.prompt(0)[:6], trace.prompt(1)[5:11])
    assert not (trace.prompt(0)[6:] == trace.prompt(1)[11:13]).all()


def test_what_is_declared_is_read_and_what_is_not_said_is_nothing(trace_of):
    trace = trace_of(lines(ROW | {"max_tokens": 9, "priority": -2, "tenant": " acme ", "output_id": 5}, ROW))
    assert (trace.max_tokens.tolist(), trace.priority.tolist()) == ([9, 0], [-2, 0])
    assert (trace.tenant.tolist(), trace.output_ids.tolist()) == (["acme", ""], [5, -1])
    trace = trace_of("arrival_s,prompt_tokens,output_tokens,max_tokens,priority,tenant\n0,5,4,9,1,acme\n1,5,4,,,\n")
    assert (trace.max_tokens.tolist(), trace.priority.tolist()) == ([9, 0], [1, 0])
    assert trace.tenant.tolist() == ["acme", ""]


def test_a_request_that_says_nothing_special_is_a_short_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    save_trace(Trace.from_lengths([0.0, 1.5], [3, 4], [5, 6]), path)
    assert json.loads(path.read_text().splitlines()[1]) == {"arrival_s": 1.5, "prompt_tokens": 4, "output_tokens": 6}


def test_a_tenant_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path):
    trace = replace(Trace.from_lengths([0], [3], [5]), tenant=np.array([" "]))
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InvalidConfig, match=r"tenant ' ' is no name"):
        save_trace(trace, path)
    assert not path.exists()
