"""What holds for every trace: it comes back from a file as it was, and a transformation changes what its name says and nothing else."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.study.traces import NOT_DECLARED, Trace, read_trace, save_trace, superposed

COLUMNS = (
    "arrival_s",
    "output_tokens",
    "segment_starts",
    "segment_ids",
    "segment_lengths",
    "max_tokens",
    "priority",
    "tenant",
    "output_ids",
)
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


@given(traces(), st.integers(1, 40))
def test_after_declaring_no_output_is_longer_than_declared_and_nothing_longer_than_the_context(trace, cap):
    context = 200
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


@given(st.lists(traces(), min_size=1, max_size=3), st.integers(0, 3))
def test_turned_traces_stay_within_the_time_of_the_longest_and_lose_nobody(several, seed):
    together = superposed(several, seed=seed)
    assert (np.diff(together.arrival_s) >= 0).all()
    assert sorted(together.prompt_tokens) == sorted(np.concatenate([trace.prompt_tokens for trace in several]))
    ends = [float(trace.arrival_s[-1]) * len(trace) / max(len(trace) - 1, 1) for trace in several]
    assert together.arrival_s[-1] <= max(ends)
