"""A token's result is the same to the last bit, whoever else is in the step, wherever its blocks lie, however its prompt is cut.

A step has 32 places in all, tokens and padding, as the engine always has it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("torch")

import torch

from paged.attention import LayerOptions, get_backend

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = 32
INVARIANT = {
    "reference": get_backend("reference"),
    "torch_gather": get_backend("torch_gather", invariant=True),
    "native": get_backend("native"),
}
each_backend = pytest.mark.parametrize("backend", INVARIANT.values(), ids=INVARIANT.keys())
law = settings(max_examples=30, derandomize=True)

# Heads of K and V, query heads for each, and their size.
SHAPES = st.sampled_from([(2, 2, 8), (1, 1, 1), (3, 1, 7), (2, 7, 64), (1, 4, 128)])
SIZES = st.builds(
    lambda shape, dtype: dict(zip(("num_kv_heads", "group", "head_dim"), shape, strict=True), dtype=dtype),
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
OPTIONS = st.builds(
    LayerOptions,
    st.sampled_from([1.0, 0.3]),
    st.none() | st.sampled_from([1, 5, 64, 100]),
    st.none() | st.sampled_from([1.0, 30.0]),
    # For the most heads of any shape; the others have the first of them.
    st.none() | st.integers(0, 9).map(lambda seed: torch.randn(14, generator=torch.Generator().manual_seed(seed))),
)


def fitting(backend, sizes, options):
    """Sizes with a dtype that the backend reads, as wide as theirs or half as wide; options with a sink for each head."""
    instead = {torch.float16: torch.bfloat16, torch.float64: torch.float32} if backend.name == "native" else {}
    sinks = None if options.sinks is None else options.sinks[: sizes["num_kv_heads"] * sizes["group"]]
    return {**sizes, "dtype": instead.get(sizes["dtype"], sizes["dtype"])}, replace(options, sinks=sinks)


# Contexts of one to four pieces of 64, and their edges.
DONE = st.integers(0, 5) | st.sampled_from([31, 63, 64, 65, 100, 127, 128, 190])
SPANS = st.tuples(DONE, st.sampled_from([1, 1, 2, 5]))
NEIGHBOURS = st.lists(SPANS, max_size=5)
BLOCK_SIZES = st.sampled_from([1, 3, 16, 64])


@pytest.fixture(scope="session")
def turn(draw_sequence):
    """A turn of `count` tokens after `done` others; the same seed gives the same sequence."""

    def build(span, seed, sizes):
        done, count = span
        return draw_sequence(done + count, seed=seed, **sizes), done, done + count

    return build


def results(scene, backend, options):
    """What each sequence of a step gets, by its place in the order of turns."""
    (found,) = scene.attend(backend, options, places=PLACES)
    return found.split(np.diff(scene.step.query_start_loc).tolist())


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [
        ("reference", False, True),
        ("reference", True, True),
        ("torch_gather", False, False),
        ("torch_gather", True, True),
        ("native", False, True),
    ],
)
def test_a_backend_says_whether_it_is_invariant(name, asked, given):
    assert get_backend(name, invariant=asked).is_invariant is given


def test_what_is_tested_here_claims_to_be_invariant():
    assert [backend.is_invariant for backend in INVARIANT.values()] == [True, True, True]


@each_backend
@law
@given(SIZES, OPTIONS, BLOCK_SIZES, SPANS, NEIGHBOURS, NEIGHBOURS)
def test_who_else_is_in_the_step_changes_nothing(
    backend, turn, lay_out, sizes, options, block_size, span, before, after
):
    sizes, options = fitting(backend, sizes, options)
    own = turn(span, 0, sizes)
    before = [turn(each, 1 + i, sizes) for i, each in enumerate(before)]
    after = [turn(each, 11 + i, sizes) for i, each in enumerate(after[:1])]
    (alone,) = results(lay_out([own], block_size=block_size), backend, options)
    crowd = results(lay_out([*before, own, *after], block_size=block_size), backend, options)
    assert torch.equal(crowd[len(before)], alone)


@each_backend
@law
@given(SIZES, OPTIONS, BLOCK_SIZES, st.lists(SPANS, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_place_in_the_step_changes_nothing(backend, turn, lay_out, sizes, options, block_size, spans, random):
    sizes, options = fitting(backend, sizes, options)
    turns = [turn(span, i, sizes) for i, span in enumerate(spans)]
    order = random.sample(range(len(turns)), len(turns))
    found = results(lay_out(turns, block_size=block_size), backend, options)
    moved = results(lay_out([turns[i] for i in order], block_size=block_size), backend, options)
    assert [torch.equal(moved[at], found[i]) for at, i in enumerate(order)] == [True] * len(turns)


@each_backend
@law
@given(SIZES, OPTIONS, BLOCK_SIZES, st.lists(SPANS, min_size=1, max_size=3), st.integers(1, 99))
def test_the_place_of_the_blocks_changes_nothing(backend, turn, lay_out, sizes, options, block_size, spans, seed):
    sizes, options = fitting(backend, sizes, options)
    turns = [turn(span, i, sizes) for i, span in enumerate(spans)]
    found = lay_out(turns, block_size=block_size).attend(backend, options, places=PLACES)
    moved = lay_out(turns, block_size=block_size, seed=seed).attend(backend, options, places=PLACES)
    assert torch.equal(moved[0], found[0])


@each_backend
@law
@given(SIZES, OPTIONS, st.lists(BLOCK_SIZES | st.integers(1, 64), min_size=2, max_size=2, unique=True), SPANS, SPANS)
def test_the_block_size_changes_nothing(backend, turn, lay_out, sizes, options, block_sizes, one, other):
    sizes, options = fitting(backend, sizes, options)
    turns = [turn(one, 0, sizes), turn(other, 1, sizes)]
    found, again = (lay_out(turns, block_size=size).attend(backend, options, places=PLACES) for size in block_sizes)
    assert torch.equal(again[0], found[0])


# Two or three sequences with more tokens than there are places, and where to cut between them.
LONG = st.lists(st.tuples(st.sampled_from([0, 3, 60]), st.integers(1, 70)), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 210), max_size=8)
EVERY_PLACES = list(range(PLACES, 300, PLACES))


@each_backend
@settings(max_examples=20, derandomize=True)
@given(SIZES, OPTIONS, LONG, CUTS)
def test_where_prompts_are_cut_changes_nothing(backend, turn, lay_out, sizes, options, spans, cuts):
    sizes, options = fitting(backend, sizes, options)
    turns = [turn(span, i, sizes) for i, span in enumerate(spans)]
    # Every run has a pool of its own: what a part has not written yet is NaN.
    whole = lay_out(turns, block_size=16).attend_in_parts(backend, options, EVERY_PLACES, PLACES)
    parts = lay_out(turns, block_size=16).attend_in_parts(backend, options, [*EVERY_PLACES, *cuts], PLACES)
    assert torch.equal(parts, whole)


@each_backend
def test_a_prompt_gives_what_its_tokens_give_one_by_one(backend, turn, lay_out):
    turns = [turn((0, 70), 0, {"dtype": torch.float32})]
    options = LayerOptions(0.3)
    whole = lay_out(turns, block_size=16).attend_in_parts(backend, options, EVERY_PLACES, PLACES)
    single = lay_out(turns, block_size=16).attend_in_parts(backend, options, list(range(70)), PLACES)
    assert torch.equal(single, whole)


# The reference has no work that is worth sharing.
@pytest.mark.parametrize("name", ["torch_gather", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_holds_for_threads_that_share_the_work(turn, lay_out, dtype, name):
    backend = INVARIANT[name]
    sizes = {"num_kv_heads": 2, "group": 7, "head_dim": 64, "dtype": dtype}
    turns = [turn((100, 1), 0, sizes), *(turn((10 * i, 3), i, sizes) for i in range(1, 10))]
    options = LayerOptions(0.125)
    torch.set_num_threads(2)
    try:
        (alone,) = results(lay_out(turns[:1], block_size=16), backend, options)
        crowd = results(lay_out(turns[::-1], block_size=16), backend, options)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(crowd[-1], alone)
