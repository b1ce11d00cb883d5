"""A token's result is the same to the last bit, whoever else is in the step, wherever its blocks lie, however its prompt is cut.

A step has 32 places in all, tokens and padding, as the engine always has it.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from paged.attention import KVPool, LayerOptions, StepTokens, get_backend

from .scenes import draw_turn, lay_out  # noqa: TID252

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = 32
# As in test_backends_agree.py.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if IS_INTERPRETED else ["reference", "torch_gather", "native"]
INVARIANT = {name: get_backend(name, invariant=True) for name in NAMES}
each_backend = pytest.mark.parametrize("backend", INVARIANT.values(), ids=INVARIANT.keys())

# Heads of K and V, query heads for each, and their size.
SHAPES = st.sampled_from([(2, 2, 8), (1, 1, 1), (3, 1, 7), (2, 7, 64), (1, 4, 128)])
SIZES = st.builds(
    lambda shape, value_dim, dtype, kv_dtype: {
        **dict(zip(("num_kv_heads", "group", "head_dim"), shape, strict=True)),
        "value_dim": value_dim,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
    },
    SHAPES,
    st.none() | st.sampled_from([5, 32]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from(["auto", "auto", "int8", "int4"]),
)
OPTIONS = st.builds(
    LayerOptions,
    st.sampled_from([1.0, 0.3]),
    st.none() | st.sampled_from([1, 5, 64, 100]),
    st.none() | st.sampled_from([1.0, 30.0]),
    # For the most heads of any shape; the others have the first of them.
    st.none() | st.integers(0, 9).map(lambda seed: torch.randn(14, generator=torch.Generator().manual_seed(seed))),
    st.none() | st.none() | st.sampled_from([1, 50, 64]),
)


INSTEAD = {
    "native": {torch.float16: torch.bfloat16, torch.float64: torch.float32},
    "triton": {torch.bfloat16: torch.float16, torch.float64: torch.float32},
}


@pytest.fixture(scope="module", autouse=True)
def rows_by_themselves():
    """A row of numpy's product, which Triton's interpreter takes, has other bits at another place of the matrix."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            product = np.matmul
            patch.setattr(np, "matmul", lambda rows, other, **of: np.stack([product(row, other, **of) for row in rows]))
        yield


def fitting(backend, sizes, options):
    """Sizes with a dtype that the backend reads, as wide as theirs or half as wide; options with a sink for each head."""
    instead = INSTEAD.get(backend.name, {})
    sinks = None if options.sinks is None else options.sinks[: sizes["num_kv_heads"] * sizes["group"]]
    return {**sizes, "dtype": instead.get(sizes["dtype"], sizes["dtype"])}, replace(options, sinks=sinks)


# Contexts of one to four pieces of 64, and their edges.
DONE = st.integers(0, 5) | st.sampled_from([31, 63, 64, 65, 100, 127, 128, 190])
SPANS = st.tuples(DONE, st.sampled_from([1, 1, 2, 5]))
BLOCK_SIZES = st.sampled_from([1, 3, 16, 64]) | st.integers(1, 64)


def results(scene, backend, options):
    """What each sequence of a step gets, by its place in the order of turns."""
    (found,) = scene.attend(backend, options, places=PLACES)
    return found.split(np.diff(scene.step.query_start_loc).tolist())


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [
        ("reference", False, True), ("reference", True, True), ("torch_gather", False, False),
        ("torch_gather", True, True), ("native", False, True),
    ],
)  # fmt: skip
def test_a_backend_bears_its_name_and_says_whether_it_is_invariant(name, asked, given):
    backend = get_backend(name, invariant=asked)
    assert (backend.name, backend.is_invariant) == (name, given)
    assert get_backend(name, invariant=asked) is not backend


@each_backend
@settings(max_examples=4 if IS_INTERPRETED else 40, derandomize=True)
@given(
    SIZES, OPTIONS, BLOCK_SIZES, st.lists(SPANS, min_size=1, max_size=6), st.none() | st.integers(1, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_a_sequence_gets_what_it_gets_alone_in_whatever_blocks(backend, sizes, options, block_size, spans, parts, seed):
    sizes, options = fitting(backend, sizes, options)
    kv_dtype = sizes.pop("kv_dtype")
    turns = [draw_turn(*span, seed=i, **sizes) for i, span in enumerate(spans)]
    blocks = {"block_size": block_size, "parts": parts, "kv_dtype": kv_dtype}
    crowd = results(lay_out(turns, seed=seed, options=[options], **blocks), backend, options)
    for i, found in enumerate(crowd):
        (alone,) = results(lay_out([turns[i]], block_size=16, kv_dtype=kv_dtype), backend, options)
        assert torch.equal(found, alone), i


# Two or three sequences with more tokens than there are places, and where to cut between them.
LONG = st.lists(st.tuples(st.sampled_from([0, 3, 60]), st.integers(1, 70)), min_size=1, max_size=3)
# At a few places, or behind each of many tokens.
CUTS = st.lists(st.integers(1, 210), max_size=8) | st.just(list(range(70)))
EVERY_PLACES = list(range(PLACES, 300, PLACES))


@each_backend
@settings(max_examples=2 if IS_INTERPRETED else 20, derandomize=True)
@given(SIZES, OPTIONS, LONG, CUTS)
def test_where_prompts_are_cut_changes_nothing(backend, sizes, options, spans, cuts):
    sizes, options = fitting(backend, sizes, options)
    kv_dtype = sizes.pop("kv_dtype")
    turns = [draw_turn(*span, seed=i, **sizes) for i, span in enumerate(spans)]
    # Every run has a pool of its own: what a part has not written yet is NaN.
    whole, parts = (
        lay_out(turns, block_size=16, kv_dtype=kv_dtype).attend_in_parts(
            backend, options, [*EVERY_PLACES, *more], PLACES
        )
        for more in ([], cuts)
    )
    assert torch.equal(parts, whole)


# The reference has no work that is worth sharing.
@pytest.mark.parametrize("name", ["torch_gather", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_holds_for_threads_that_share_the_work(dtype, name):
    backend = INVARIANT[name]
    sizes = {"num_kv_heads": 2, "group": 7, "head_dim": 64, "dtype": dtype}
    turns = [
        draw_turn(*span, seed=i, **sizes) for i, span in enumerate([(100, 1), *((10 * i, 3) for i in range(1, 10))])
    ]
    options = LayerOptions(0.125)
    torch.set_num_threads(2)
    try:
        (alone,) = results(lay_out(turns[:1], block_size=16), backend, options)
        crowd = results(lay_out(turns[::-1], block_size=16), backend, options)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(crowd[-1], alone)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "largest"),
    [(9, 3, 64, 1), (14, 2, 80, 1), (4, 4, 40, 1), (8, 1, 128, 1), (3, 1, 64, 1e-38)],
)
def test_native_bits_are_those_of_any_number_of_rows(kv_dtype, heads, kv_heads, size, largest):
    """By a matrix unit or without it, in tiles that are full or not, down to the signs of zeros where numbers are too small to be normal."""
    sizes = {"num_layers": 1, "num_blocks": 10, "block_size": 16, "num_kv_heads": kv_heads, "head_dim": size}
    pool = KVPool(**sizes, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    drawn = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(150, kv_heads, size, generator=drawn) for _ in range(2))
    pool.write_kv(0, torch.arange(150), keys.bfloat16(), (values * largest).bfloat16())
    queries = (3 * torch.randn(150, heads, size, generator=drawn)).bfloat16()
    backend = INVARIANT["native"]

    def in_parts_of(count, options):
        found = []
        for first in range(0, 150, count):
            last = min(first + count, 150)
            positions, new = np.arange(first, last), np.array([0, last - first])
            step = StepTokens(positions, positions, new, np.array([last]), np.arange(10, dtype=np.int32)[None], 16)
            found.append(backend.attend(queries[first:last], pool, 0, backend.prepare(step, pool), options))
        return torch.cat(found).view(torch.int16)

    for options in (LayerOptions(size**-0.5), LayerOptions(size**-0.5, window=20), LayerOptions(0.1, soft_cap=5.0)):
        whole = in_parts_of(150, options)
        for count in (1, 7, 33):
            assert torch.equal(in_parts_of(count, options), whole), (count, options)
