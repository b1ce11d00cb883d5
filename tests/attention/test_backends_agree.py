"""Every backend gives what the reference gives, and the reference what attention is by its textbook definition."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from paged.attention import KVPool, LayerOptions, StepTokens, get_backend

from .scenes import draw_turn, lay_out  # noqa: TID252

pytestmark = pytest.mark.usefixtures("one_thread")

# Those in Triton need a GPU, or its interpreter: test_on_gpus.py starts a process that has it, and takes these tests for ours.
# xformers_splitk has tests of its own.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if IS_INTERPRETED else ["native", "torch_gather"]
EXAMPLES = 6 if IS_INTERPRETED else 40
REFERENCE = get_backend("reference")
READS = {
    "native": (torch.float32, torch.bfloat16),
    "torch_gather": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "triton": (torch.float32, torch.float16),
}


# One that is invariant in any case has no other mode.
MODES = [(name, is_so) for name in NAMES for is_so in (False, True) if not (is_so and get_backend(name).is_invariant)]
each_mode = pytest.mark.parametrize(("name", "invariant"), MODES, ids=str)

# Absolute and relative, for values of size 1. The results differ by the order of sums; in the 16 bit types also by weights and
# scores that may be rounded to the type, whose spacing at 1 is 2**-10 and 2**-7.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
# The reference rounds once, when it is done.
OWN_TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


# One more than, one less than and just what fills a block of a usual size, or a piece of 64.
LENGTHS = st.integers(0, 6) | st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 140])
WINDOWS = st.none() | st.integers(1, 4) | st.sampled_from([16, 64, 65, 1000])
CHUNKS = st.none() | st.none() | st.sampled_from([1, 5, 16, 64, 100])
SOFT_CAPS = st.none() | st.sampled_from([0.5, 2.0, 30.0])


@st.composite
def cases(draw: st.DrawFn, dtypes=tuple(TOLERANCES)):
    """A step: for each sequence, tokens before it and tokens of its own; layers of different options share one plan. `parts`: pages of a block;
    None: it has all layers. `kv_dtype`: how K and V are stored."""
    turns = draw(st.lists(st.tuples(LENGTHS, st.sampled_from([1, 1, 1, 2, 3, 7])), min_size=1, max_size=8))
    head_dim = draw(st.sampled_from([1, 3, 7, 8, 16, 33, 64]))
    # Scores have a standard deviation of 1.7 at most: those of 16 bits could not tell much larger ones apart.
    scales = st.sampled_from([0.3, 1.0, 1.7]).map(lambda spread: spread / head_dim**0.5)
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 70]))
    dtype = draw(st.sampled_from(dtypes))
    sources = st.integers(0, 99).map(lambda seed: torch.Generator().manual_seed(seed))
    sinks = st.none() | sources.map(lambda source: torch.randn(num_kv_heads * group, generator=source))
    return SimpleNamespace(
        turns=turns,
        block_size=draw(st.sampled_from([1, 2, 16, 64]) | st.integers(1, 64)),
        sizes={
            "num_kv_heads": num_kv_heads,
            "group": group,
            "head_dim": head_dim,
            "value_dim": draw(st.none() | st.sampled_from([1, 8, 24, 33])),
            "dtype": dtype,
        },
        num_padded=draw(st.integers(0, 3)),
        options=draw(
            st.lists(st.builds(LayerOptions, scales, WINDOWS, SOFT_CAPS, sinks, CHUNKS), min_size=1, max_size=2)
        ),
        parts=draw(st.none() | st.integers(1, 3)),
        kv_dtype=draw(st.sampled_from(["auto", "auto", "int8", "int4"])),
        seed=draw(st.integers(0, 2**16)),
    )


def build(case):
    """A case's sequences, and scene."""
    turns = [draw_turn(*turn, seed=case.seed + i, **case.sizes) for i, turn in enumerate(case.turns)]
    sizes = {"block_size": case.block_size, "parts": case.parts, "kv_dtype": case.kv_dtype}
    return turns, lay_out(turns, seed=case.seed, options=case.options, **sizes)


def assert_close(found, expected, tolerances):
    tolerance = tolerances[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def as_stored(numbers, kv_dtype):
    """What comes back of K or V, [tokens, heads, size], float64."""
    if kv_dtype == "auto":
        return numbers.double()
    count, heads, size = numbers.shape
    sizes = {"num_layers": 1, "num_blocks": 1, "block_size": count, "num_kv_heads": heads, "head_dim": size}
    pool = KVPool(**sizes, kv_dtype=kv_dtype)
    pool.write_kv(0, torch.arange(count), numbers, numbers)
    own = pool.layer(0).keys
    return own.transformed(own.decoded(*(each.blocks[0] for each in own.stored)).double())


def dense(turn, options, kv_dtype):
    """Attention as it is defined, over contiguous K and V as they are stored, in float64: [count, num_heads, head_dim]."""
    sequence, done, stop = turn
    queries = sequence.queries[:stop].double()
    keys, values = (as_stored(each[:stop], kv_dtype) for each in (sequence.keys, sequence.values))
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    positions = torch.arange(stop)
    scores = torch.einsum("thd,shd->hts", queries[done:], keys) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    distances = positions[done:, None] - positions
    is_seen = (distances >= 0) & (distances < (options.window or stop + 1))
    if options.chunk is not None:
        is_seen &= positions[done:, None] // options.chunk == positions // options.chunk
    weights = scores.masked_fill(~is_seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total += options.sinks.double().exp()[:, None, None]
    return torch.einsum("hts,shd->thd", weights / total, values)


@settings(max_examples=40, derandomize=True)
@given(cases())
def test_the_reference_is_dense_attention(case):
    turns, scene = build(case)
    for options, found in zip(case.options, scene.attend(REFERENCE, *case.options), strict=True):
        expected = torch.cat([dense(turn, options, case.kv_dtype) for turn in turns])
        assert_close(found, expected, OWN_TOLERANCES)


@each_mode
@settings(max_examples=EXAMPLES, derandomize=True)
@given(st.data())
def test_a_backend_gives_what_the_reference_gives(name, invariant, data):
    backend = get_backend(name, invariant=invariant)
    case = data.draw(cases(READS[name]))
    _, scene = build(case)
    places = scene.step.num_tokens + case.num_padded
    expected = scene.attend(REFERENCE, *case.options)
    results = scene.attend(backend, *case.options, places=places)
    for found, wanted in zip(results, expected, strict=True):
        assert_close(found, wanted, TOLERANCES)


@each_mode
@pytest.mark.parametrize("block_size", [1, 48, 128])
@pytest.mark.parametrize("reach", [{"window": 20}, {"chunk": 70}], ids=["window", "chunk"])
def test_a_front_far_behind_the_start_is_found_in_blocks_of_any_size(name, invariant, block_size, reach):
    options = LayerOptions(0.3, **reach)
    turns = [draw_turn(300, 1, seed=0), draw_turn(290, 3, seed=1)]
    scene = lay_out(turns, block_size=block_size, options=[options])
    (expected,), (found,) = (
        scene.attend(each, options) for each in (REFERENCE, get_backend(name, invariant=invariant))
    )
    assert_close(found, expected, TOLERANCES)


@pytest.fixture(params=[("reference", False), *MODES], ids=str)
def backend(request):
    """Each backend in each of its modes, the reference included."""
    name, is_invariant = request.param
    return get_backend(name, invariant=is_invariant)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_scores_far_from_zero_are_weighed_by_their_differences(backend, score):
    sequence, *turn = draw_turn(99, 1, seed=0, num_kv_heads=1, group=1, head_dim=1)
    sequence.queries[:], sequence.keys[:], sequence.keys[1:99] = 1, score, score - 1000
    sequence.values[:, 0, 0] = torch.arange(100)
    scene = lay_out([(sequence, *turn)], block_size=4)
    # The first and the last one weigh as much, and the others nothing.
    assert attend(scene, backend).item() == (0 + 99) / 2


def attend(scene, backend, **options):
    (found,) = scene.attend(backend, LayerOptions(1.0, **options))
    return found


def test_a_step_of_nobody_gives_padding(backend):
    scene = lay_out([draw_turn(0, 3, seed=0)], block_size=4)
    none = np.zeros(0, np.int64)
    nobody = StepTokens(none, none, np.zeros(1, np.int64), none, np.zeros((0, 4), np.int32), 4)
    for places in (2, 0):
        (found,) = replace(scene, step=nobody).attend(backend, LayerOptions(1.0), places=places)
        assert len(found) == 0


@each_mode
def test_what_a_backend_did_before_does_not_show(name, invariant):
    backend = get_backend(name, invariant=invariant)
    for done, count, head_dim in [(0, 3, 8), (40, 1, 8), (0, 1, 4), (150, 2, 8), (7, 1, 8), (0, 90, 8), (7, 1, 16)]:
        scene = lay_out([draw_turn(done, count, seed=count, head_dim=head_dim)], block_size=16)
        (alone,) = scene.attend(get_backend(name, invariant=invariant), LayerOptions(0.3))
        (found,) = scene.attend(backend, LayerOptions(0.3))
        assert torch.equal(found, alone)


def test_a_backend_that_began_in_inference_mode_goes_on_outside(backend):
    scene = lay_out([draw_turn(4, 5, seed=0)], block_size=4)
    with torch.inference_mode():
        within = attend(scene, backend)
    assert torch.equal(attend(scene, backend), within)


@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES for dtype in (torch.bfloat16, torch.float16) if dtype in READS[name]],
)
def test_scores_of_16_bit_queries_are_not_rounded_to_16_bits(name, dtype, soft_cap):
    """Scores of about 20, of which such a number keeps a tenth: weights would be off by as much."""
    sizes = {"num_kv_heads": 1, "group": 4, "head_dim": 64, "dtype": dtype}
    scene = lay_out([draw_turn(63, 1, seed=seed, **sizes) for seed in range(8)], block_size=64)
    ours, expected = (attend(scene, get_backend(each), soft_cap=soft_cap).float() for each in (name, "reference"))
    assert (ours - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
