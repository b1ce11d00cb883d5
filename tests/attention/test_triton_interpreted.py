"""What only `triton` has: stretches side by side and one after the other, plans that are renewed. Its kernels run in Triton's interpreter on the CPU.

`test_on_gpus.py` starts this, and `triton` in the tests of all backends, in a process whose environment turns the interpreter on; anywhere else it is skipped.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_gpus.py runs it", allow_module_level=True)
pytest.importorskip("triton")

import torch

from paged.attention import LayerOptions, get_backend
from paged.attention.block_kernel import _merge_stretches

LAYER = 1
LONG = (200, 1), (0, 3), (90, 20), (63, 1), (64, 2)


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


@pytest.fixture(scope="session")
def build(draw_turn, lay_out):
    """The scene of a step of such turns."""

    def build(turns, dtype=torch.float32, **layout):
        return lay_out(
            [draw_turn(*turn, seed=i, head_dim=16, dtype=dtype) for i, turn in enumerate(turns)],
            block_size=16,
            **layout,
        )

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(0.25),
        LayerOptions(0.25, window=70, soft_cap=2.0),
        LayerOptions(0.25, chunk=50, sinks=torch.tensor([0.5, 3.0, -1.0, 2.0])),
    ],
    ids=["plain", "window and cap", "chunk and sinks"],
)
def test_stretches_give_the_same_bits_side_by_side_and_one_after_the_other(build, short_stretches, dtype, options):
    scene = build(LONG, dtype, options=[options])
    backend = get_backend("triton", invariant=True)
    (wanted,) = scene.attend(get_backend("reference"), options)
    merges = short_stretches(2**30)
    (side_by_side,) = scene.attend(backend, options)
    assert len(merges) == 1
    short_stretches(0)
    (one_by_one,) = scene.attend(backend, options)
    assert len(merges) == 1 and side_by_side.equal(one_by_one)
    bound = 5e-6 if dtype == torch.float32 else 2 * 2**-10
    torch.testing.assert_close(side_by_side.double(), wanted.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_stretches_of_codes_and_of_blocks_on_two_pages(build, short_stretches, kv_dtype):
    short_stretches(2**30)
    scene = build(LONG, parts=2, kv_dtype=kv_dtype)
    for invariant in (False, True):
        (found,), (wanted,) = (
            scene.attend(each, LayerOptions(0.25))
            for each in (get_backend("triton", invariant=invariant), get_backend("reference"))
        )
        torch.testing.assert_close(found, wanted, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_small_values_in_codes_are_not_lost_in_float16(draw_turn, lay_out, kv_dtype):
    """One score above all others: the weights of the others are small, and so are scales."""
    history, *turn = draw_turn(200, 1, seed=1, head_dim=16, dtype=torch.float16)
    history.keys[:] = 0
    history.keys[100] = 4
    history.queries[:] = 2
    history.values.mul_(0.005)
    scene = lay_out([(history, *turn)], block_size=16, kv_dtype=kv_dtype)
    (found,), (wanted,) = (scene.attend(get_backend(each), LayerOptions(0.06)) for each in ("triton", "reference"))
    assert (found.double() - wanted.double()).abs().max() <= 2e-3 * wanted.double().abs().max()


def test_a_plan_takes_another_decode_into_its_tensors(build):
    scene = build([(100, 1), (90, 1), (70, 1), (127, 1)], parts=2)
    first, second = scene.step.part(0, 2), scene.step.part(2, 4)
    scene.pool.write_kv(LAYER, scene.step.slot_tensor(scene.pool.device), scene.keys, scene.values)
    backend, options = get_backend("triton"), [LayerOptions(0.25, window) for window in (None, 20)]
    plan = backend.prepare(first, scene.pool)

    def attend(queries):
        return torch.cat([backend.attend(queries, scene.pool, LAYER, plan, each) for each in options])

    def tensors():
        return [each.data_ptr() for each in (*plan.tables.values(), *(its.pieces for [its] in plan.pieces.values()))]

    attend(scene.queries[:2])
    there = tensors()
    backend.renew(plan, second, scene.pool)
    wanted = torch.cat([each[2:] for each in scene.attend(get_backend("reference"), *options)])
    torch.testing.assert_close(attend(scene.queries[2:]), wanted, rtol=5e-6, atol=5e-6)
    assert there == tensors() and len(there) == 3


def test_queries_may_lie_head_by_head(build):
    scene = build([(40, 3)])
    turned = scene.queries.transpose(0, 1).contiguous().transpose(0, 1)
    backend = get_backend("triton")
    plan = backend.prepare(scene.step, scene.pool)
    scene.pool.write_kv(LAYER, scene.step.slot_tensor(scene.pool.device), scene.keys, scene.values)
    found = [backend.attend(each, scene.pool, LAYER, plan, LayerOptions(0.25)) for each in (scene.queries, turned)]
    assert found[0].equal(found[1])
