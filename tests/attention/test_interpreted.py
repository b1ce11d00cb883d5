"""What only `triton` and `xformers_splitk` have, their kernels run by Triton's interpreter on the CPU: stretches, tiles, plans that are renewed.

`test_on_gpus.py` starts this, and `triton` in the tests of all backends, in a process whose environment turns the interpreter on; anywhere else it is skipped.
"""

import os
import sys
import warnings
from contextlib import suppress

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_gpus.py runs it", allow_module_level=True)
pytest.importorskip("triton")
with warnings.catch_warnings(), suppress(ImportError):
    # xformers asks for an autotuner in a way that newer Tritons deprecate.
    warnings.simplefilter("ignore")
    import xformers.ops.fmha._triton.splitk_kernels  # noqa: F401

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from paged.attention import LayerOptions, StepTokens, get_backend
from paged.attention.block_kernel import _merge_stretches
from paged.attention.copy_kernel import copy_rows
from paged.attention.pages import _kernel
from paged.errors import UnsupportedByBackend

from .scenes import LAYER, draw_turn, lay_out  # noqa: TID252

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
of_xformers = pytest.mark.skipif(
    "xformers.ops.fmha._triton.splitk_kernels" not in sys.modules, reason="the extra gpu brings xformers"
)

PLAIN = LayerOptions(0.25)
LONG = (200, 1), (0, 3), (90, 20), (63, 1), (64, 2)
# Absolute and relative, for values of size 1. The spacing of float16 there is 2**-10: weights are rounded to it, and so are results.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2 * 2**-10}


def build(*turns, block_size=16, group=2, num_kv_heads=2, head_dim=16, seed=0, dtype=torch.float16, **layout):
    """The scene of a step: for each sequence how many tokens were there and how many come; blocks in an order of `seed`."""
    sizes = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    drawn = [draw_turn(*turn, seed=seed + i, **sizes) for i, turn in enumerate(turns)]
    return lay_out(drawn, block_size=block_size, seed=seed, **layout)


def assert_as_reference(scene, *options, backend=None, num_padded=0):
    """A backend, xformers' if none is given, gives what the reference gives, under each of these options; its results."""
    backend = backend or get_backend("xformers_splitk")
    expected = scene.attend(get_backend("reference"), *options)
    results = scene.attend(backend, *options, places=scene.step.num_tokens + num_padded)
    for found, wanted in zip(results, expected, strict=True):
        assert_close(found, wanted)
    return results


def assert_close(found, wanted):
    bound = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound, atol=bound)


@pytest.fixture
def short_stretches(monkeypatch):
    """Stretches of 64 positions, and a function that sets how many bytes of what comes of them there may be: 0, they come one after the other. It
    returns how often stretches were merged by a kernel of their own."""
    monkeypatch.setattr("paged.attention.block_kernel.STRETCH", 64)
    merges = []

    class Counted:
        def __getitem__(self, grid):
            merges.append(grid)
            return _merge_stretches[grid]

    monkeypatch.setattr("paged.attention.block_kernel._merge_stretches", Counted())

    def at_most(count):
        monkeypatch.setattr("paged.attention.block_kernel._MOST_PARTIAL_BYTES", count)
        return merges

    return at_most


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        LayerOptions(0.25, window=70, soft_cap=2.0),
        LayerOptions(0.25, chunk=50, sinks=torch.tensor([0.5, 3.0, -1.0, 2.0])),
    ],
    ids=["plain", "window and cap", "chunk and sinks"],
)
def test_stretches_give_the_same_bits_side_by_side_and_one_after_the_other(short_stretches, dtype, options):
    scene = build(*LONG, dtype=dtype, options=[options])
    backend = get_backend("triton", invariant=True)
    merges = short_stretches(2**30)
    (side_by_side,) = assert_as_reference(scene, options, backend=backend)
    assert len(merges) == 1
    short_stretches(0)
    (one_by_one,) = scene.attend(backend, options)
    assert len(merges) == 1 and side_by_side.equal(one_by_one)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_stretches_of_codes_and_of_blocks_on_two_pages(short_stretches, kv_dtype):
    short_stretches(2**30)
    scene = build(*LONG, dtype=torch.float32, parts=2, kv_dtype=kv_dtype)
    for invariant in (False, True):
        assert_as_reference(scene, PLAIN, backend=get_backend("triton", invariant=invariant))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_small_values_in_codes_are_not_lost_in_float16(kv_dtype):
    """One score above all others: the weights of the others are small, and so are scales."""
    history, *turn = draw_turn(200, 1, seed=1, head_dim=16, dtype=torch.float16)
    history.keys[:] = 0
    history.keys[100] = 4
    history.queries[:] = 2
    history.values.mul_(0.005)
    scene = lay_out([(history, *turn)], block_size=16, kv_dtype=kv_dtype)
    (found,), (wanted,) = (scene.attend(get_backend(each), LayerOptions(0.06)) for each in ("triton", "reference"))
    assert (found.double() - wanted.double()).abs().max() <= 2e-3 * wanted.double().abs().max()


TENSORS = {
    "triton": lambda plan: [*plan.tables.values(), *(its.pieces for [its] in plan.pieces.values())],
    "xformers_splitk": lambda plan: [mask.block_tables for masks in plan.masks.values() for mask in masks],
}
"""Tensors that a plan keeps."""


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("triton", torch.float32, {"parts": 2}),
        pytest.param("xformers_splitk", torch.float16, {"num_kv_heads": 1}, marks=of_xformers),
    ],
)
def test_a_plan_takes_another_decode_into_its_tensors(name, dtype, layout):
    scene = build((100, 1), (90, 1), (70, 1), (127, 1), dtype=dtype, **layout)
    first, second = scene.step.part(0, 2), scene.step.part(2, 4)
    scene.pool.write_kv(LAYER, scene.step.slot_tensor(scene.pool.device), scene.keys, scene.values)
    backend, options = get_backend(name), [LayerOptions(0.25, window) for window in (None, 20)]
    plan = backend.prepare(first, scene.pool)

    def attend(queries):
        return torch.cat([backend.attend(queries, scene.pool, LAYER, plan, each) for each in options])

    def places():
        return [each.data_ptr() for each in TENSORS[name](plan)]

    attend(scene.queries[:2])
    there = places()
    backend.renew(plan, second, scene.pool)
    assert_close(
        attend(scene.queries[2:]), torch.cat([each[2:] for each in scene.attend(get_backend("reference"), *options)])
    )
    assert there == places() and len(there) >= 2


def test_queries_may_lie_head_by_head():
    scene = build((40, 3), dtype=torch.float32)
    turned = scene.queries.transpose(0, 1).contiguous().transpose(0, 1)
    backend = get_backend("triton")
    plan = backend.prepare(scene.step, scene.pool)
    scene.pool.write_kv(LAYER, scene.step.slot_tensor(scene.pool.device), scene.keys, scene.values)
    found = [backend.attend(each, scene.pool, LAYER, plan, PLAIN) for each in (scene.queries, turned)]
    assert found[0].equal(found[1])


DECODES = (0, 1), (15, 1), (16, 1), (130, 1)
# Takes seconds each.
MIXED = (40, 1), (0, 17), (70, 4), (129, 3)
GROUPED = (33, 1), (20, 5)


@of_xformers
@pytest.mark.parametrize(
    ("turns", "sizes"),
    [
        (DECODES, {"block_size": 16}),
        # A block that is several tiles.
        (MIXED, {"block_size": 64, "num_kv_heads": 1}),
        *[(GROUPED, {"block_size": 32, "num_kv_heads": heads, "group": group}) for heads, group in ((3, 1), (2, 7))],
    ],
)
def test_decodes_chunks_and_drafts_of_any_heads_read_blocks_wherever_they_lie(turns, sizes):
    assert_as_reference(build(*turns, **sizes), PLAIN, num_padded=3)


@of_xformers
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_large_heads_have_tiles_of_their_own(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    scene = build((17, 1), (30, 16), num_kv_heads=1, group=8, head_dim=128)
    assert_as_reference(scene, LayerOptions(0.09))


@of_xformers
def test_layers_with_and_without_a_window_share_a_plan():
    scene = build((140, 1), (65, 3), num_kv_heads=1)
    assert_as_reference(scene, *(LayerOptions(0.25, window) for window in (1, 17, None, 1000)))


@of_xformers
def test_layers_on_pages_of_their_own_are_read_by_the_tables_of_that_page():
    scene = build((100, 1), (30, 7), parts=2, is_even=True)
    assert scene.pool.layer(1).keys.part == 1
    assert_as_reference(scene, *(LayerOptions(0.25, window) for window in (None, 20)))


@of_xformers
@pytest.mark.parametrize(("done", "count"), [(100, 1), (106, 20)])
def test_blocks_in_front_of_the_window_may_be_somebody_elses(done, count):
    scene = build((done, count))
    num_passed = (done - 20 + 1) // 16
    passed = scene.step.block_tables[0, :num_passed]
    scene.pool.poison(torch.from_numpy(passed.astype(np.int64)))
    assert_as_reference(scene, LayerOptions(0.25, window=20))


@of_xformers
@settings(max_examples=3)
@given(
    turns=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 3, 7, 16, 18])), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32, 64]),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_any_step_gives_what_the_reference_gives(turns, block_size, group, window, seed):
    scene = build(*turns, block_size=block_size, group=group, num_kv_heads=1, seed=seed)
    assert_as_reference(scene, LayerOptions(0.25, window))


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


@of_xformers
def test_a_step_of_padding_alone_gives_zeros():
    scene = build((3, 2))
    none = np.zeros(0, np.int64)
    step = StepTokens(none, none, np.zeros(1, np.int64), none, np.zeros((0, 1), np.int32), 16, num_padded=4)
    backend = get_backend("xformers_splitk")
    plan = backend.prepare(step, scene.pool)
    queries = torch.full((4, 4, 16), torch.nan, dtype=torch.float16)
    assert backend.attend(queries, scene.pool, 0, plan, PLAIN).eq(0).all()


@of_xformers
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"soft_cap": 30.0}, "a soft cap on scores; the backends"), ({"sinks": torch.zeros(4)}, "attention sinks; the"),
        ({"chunk": 16}, "attention within chunks; the"),
    ],
    ids=["soft cap", "sinks", "chunk"],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_anything_is_computed(option, message):
    with pytest.raises(UnsupportedByBackend, match=message):
        build((3, 2)).attend(get_backend("xformers_splitk"), LayerOptions(0.25, **option))
