"""`xformers_splitk` against the reference, its kernels run by Triton's interpreter on the CPU.

`test_on_gpus.py` starts this in a process whose environment turns the interpreter on; anywhere else it is skipped.
"""

import os
import warnings

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_gpus.py runs it", allow_module_level=True)
with warnings.catch_warnings():
    # xformers asks for an autotuner in a way that newer Tritons deprecate.
    warnings.simplefilter("ignore")
    pytest.importorskip("triton")
    pytest.importorskip("xformers.ops.fmha._triton.splitk_kernels")

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from paged.attention import LayerOptions, StepTokens, get_backend
from paged.attention.copy_kernel import copy_rows
from paged.attention.pages import _kernel
from paged.errors import UnsupportedByBackend

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")

REFERENCE = get_backend("reference")
XFORMERS = get_backend("xformers_splitk")
PLAIN = LayerOptions(0.25)
LAYER = 1
# Absolute and relative, for values of size 1, whose spacing is 2**-10: weights are rounded to float16, and so are results.
TOLERANCE = 2 * 2**-10


@pytest.fixture(scope="session")
def build(draw_turn, lay_out):
    """The scene of a step: for each sequence how many tokens were there and how many come; blocks in an order of `seed`."""

    def build(*turns, block_size=16, group=2, num_kv_heads=2, head_dim=16, seed=0, **layout):
        sizes = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dtype": torch.float16}
        drawn = [draw_turn(*turn, seed=seed + i, **sizes) for i, turn in enumerate(turns)]
        return lay_out(drawn, block_size=block_size, seed=seed, **layout)

    return build


def assert_as_reference(scene, *options, num_padded=0):
    """Both backends give finite results, and they agree."""
    expected = scene.attend(REFERENCE, *options)
    places = scene.step.num_tokens + num_padded
    for found, wanted in zip(scene.attend(XFORMERS, *options, places=places), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE, atol=TOLERANCE)


DECODES = (0, 1), (15, 1), (16, 1), (130, 1)
# Takes seconds each.
MIXED = (40, 1), (0, 17), (70, 4), (129, 3)
GROUPED = (33, 1), (20, 5)


@pytest.mark.parametrize(
    ("turns", "sizes"),
    [
        (DECODES, {"block_size": 16}),
        # A block that is several tiles.
        (MIXED, {"block_size": 64, "num_kv_heads": 1}),
        *[(GROUPED, {"block_size": 32, "num_kv_heads": heads, "group": group}) for heads, group in ((3, 1), (2, 7))],
    ],
)
def test_decodes_chunks_and_drafts_of_any_heads_read_blocks_wherever_they_lie(build, turns, sizes):
    assert_as_reference(build(*turns, **sizes), PLAIN, num_padded=3)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_large_heads_have_tiles_of_their_own(build, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    scene = build((17, 1), (30, 16), num_kv_heads=1, group=8, head_dim=128)
    assert_as_reference(scene, LayerOptions(0.09))


def test_layers_with_and_without_a_window_share_a_plan(build):
    scene = build((140, 1), (65, 3), num_kv_heads=1)
    assert_as_reference(scene, *(LayerOptions(0.25, window) for window in (1, 17, None, 1000)))


def test_layers_on_pages_of_their_own_are_read_by_the_tables_of_that_page(build):
    scene = build((100, 1), (30, 7), parts=2, is_even=True)
    assert scene.pool.layer(1).keys.part == 1
    assert_as_reference(scene, *(LayerOptions(0.25, window) for window in (None, 20)))


@pytest.mark.parametrize(("done", "count"), [(100, 1), (106, 20)])
def test_blocks_in_front_of_the_window_may_be_somebody_elses(build, done, count):
    scene = build((done, count))
    num_passed = (done - 20 + 1) // 16
    passed = scene.step.block_tables[0, :num_passed]
    scene.pool.poison(torch.from_numpy(passed.astype(np.int64)))
    assert_as_reference(scene, LayerOptions(0.25, window=20))


@settings(max_examples=3)
@given(
    turns=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 3, 7, 16, 18])), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32, 64]),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_any_step_gives_what_the_reference_gives(build, turns, block_size, group, window, seed):
    scene = build(*turns, block_size=block_size, group=group, num_kv_heads=1, seed=seed)
    assert_as_reference(scene, LayerOptions(0.25, window))


def test_a_plan_takes_another_decode_into_its_tensors(build):
    scene = build((100, 1), (90, 1), (70, 1), (127, 1), num_kv_heads=1)
    first, second = scene.step.part(0, 2), scene.step.part(2, 4)
    scene.pool.write_kv(LAYER, scene.step.slot_tensor(scene.pool.device), scene.keys, scene.values)
    options = [LayerOptions(0.25, window) for window in (None, 20)]
    plan = XFORMERS.prepare(first, scene.pool)
    for each in options:
        XFORMERS.attend(scene.queries[:2], scene.pool, LAYER, plan, each)
    there = [mask.block_tables.data_ptr() for masks in plan.masks.values() for mask in masks]
    XFORMERS.renew(plan, second, scene.pool)
    for each in options:
        found = XFORMERS.attend(scene.queries[2:], scene.pool, LAYER, plan, each)
        wanted = scene.attend(REFERENCE, each)[0][2:]
        torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE, atol=TOLERANCE)
    assert there == [mask.block_tables.data_ptr() for masks in plan.masks.values() for mask in masks]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("words", [1, 7, 4096, 5000])
def test_the_kernel_that_copies_pages_copies_these_and_no_others(dtype, words):
    source, target = torch.arange(7 * words).view(7, words).to(dtype), torch.zeros(9, words, dtype=dtype)
    wanted = target.clone()
    sources, destinations = torch.tensor([6, 0, 3]), torch.tensor([1, 8, 4])
    wanted[destinations] = source[sources]
    copy_rows(source, target, sources, destinations)
    copy_rows(source, target, sources[:0], destinations[:0])
    assert target.equal(wanted)
    assert _kernel(source.device) is copy_rows


def test_the_kernel_that_copies_pages_reaches_those_behind_two_gigabytes():
    # What is not written takes no memory.
    large, small = torch.empty(2**31 // 4096 + 2, 4096, dtype=torch.uint8), torch.full((2, 4096), 7, dtype=torch.uint8)
    last, first = torch.tensor([len(large) - 1]), torch.tensor([0])
    copy_rows(small, large, first, last)
    assert large[-1].eq(7).all()
    large[-1] = 9
    copy_rows(large, small, last, first)
    assert small[0].eq(9).all() and small[1].eq(7).all()


def test_a_step_of_padding_alone_gives_zeros(build):
    scene = build((3, 2))
    none = np.zeros(0, np.int64)
    step = StepTokens(none, none, np.zeros(1, np.int64), none, np.zeros((0, 1), np.int32), 16, num_padded=4)
    plan = XFORMERS.prepare(step, scene.pool)
    queries = torch.full((4, 4, 16), torch.nan, dtype=torch.float16)
    assert XFORMERS.attend(queries, scene.pool, 0, plan, PLAIN).eq(0).all()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"soft_cap": 30.0}, "a soft cap on scores; the backends"), ({"sinks": torch.zeros(4)}, "attention sinks; the"),
        ({"chunk": 16}, "attention within chunks; the"),
    ],
    ids=["soft cap", "sinks", "chunk"],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_anything_is_computed(build, option, message):
    with pytest.raises(UnsupportedByBackend, match=message):
        build((3, 2)).attend(XFORMERS, LayerOptions(0.25, **option))
