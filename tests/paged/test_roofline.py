"""The cost model from published figures: its arithmetic by hand, its laws, and the memory that it leaves."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged import Costs
from paged.study.hardware import Placement, Roofline, StepWork, device_named, model_named

IDEAL = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "link_efficiency": 1.0, "host_overhead_s": 0.0}
AMOUNTS = StepWork.__struct_fields__


def roofline(model="llama-2-13b", device="a100-40g", **options):
    return Roofline(model=model_named(model), device=device_named(device), **options)


ROOFLINES = [
    roofline(),
    roofline("llama-3-70b", "h100", tensor_parallel=4),
    roofline("deepseek-v2", "h200", tensor_parallel=8),
    roofline("deepseek-v2", "h200", tensor_parallel=8, split_context=True),
    roofline("opt-13b", "cpu"),
    roofline("llama-2-70b", "groq-lpu", dtype="fp16", tensor_parallel=1024, split_context=True),
]


@st.composite
def works(draw):
    """Steps of up to 64 rows, each as the rows' lengths make it."""
    tokens = draw(st.lists(st.integers(1, 600), min_size=1, max_size=64))
    before = draw(st.lists(st.integers(0, 30_000), min_size=len(tokens), max_size=len(tokens)))
    context = np.add(tokens, before)
    return StepWork.of_rows(
        tokens,
        context,
        sampled_rows=draw(st.integers(0, len(tokens))),
        moved_tokens=draw(st.sampled_from([0, 16, 4096])),
    )


def test_a_step_that_does_nothing_takes_no_time_and_numbers_give_a_number():
    found = [step.seconds(StepWork(computed_tokens=0)) for step in ROOFLINES]
    assert (found, {type(seconds) for seconds in found}) == ([0.0] * len(ROOFLINES), {float})


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=10)
@given(steps=st.lists(works(), min_size=1, max_size=5))
def test_many_steps_at_once_take_what_each_takes(step, steps):
    columns = {name: np.array([getattr(work, name) for work in steps], np.float64) for name in AMOUNTS}
    together = step.seconds(StepWork(**columns))
    assert together.shape == (len(steps),)
    assert together.tolist() == pytest.approx([step.seconds(work) for work in steps], rel=1e-12)


@pytest.mark.parametrize("step", ROOFLINES, ids=lambda step: f"{step.model.name}-{step.device.name}")
@settings(max_examples=20)
@given(work=works(), amount=st.sampled_from(AMOUNTS), more=st.integers(1, 10_000))
def test_no_amount_makes_a_step_shorter(step, work, amount, more):
    larger = msgspec.structs.replace(work, **{amount: getattr(work, amount) + more})
    assert step.seconds(larger) >= step.seconds(work)


def test_costs_are_the_price_of_a_full_step_and_of_the_link():
    latent = roofline("deepseek-v2", "h200", **IDEAL)
    prefill = latent.seconds(StepWork.of_rows([65_536], [65_536], sampled_rows=0))
    assert latent.costs(16).recompute(0, 65_536) == pytest.approx(prefill, rel=0.01)
    step = roofline(**IDEAL)
    costs = step.costs(16)
    assert isinstance(costs, Costs)
    assert costs.seconds_per_swapped_block == pytest.approx(16 * 819_200 / 32e9)
    # Recomputing is the same arithmetic as a prefill, without the output projection.
    prefill = step.seconds(StepWork.of_rows([4096], [4096], sampled_rows=0))
    assert costs.recompute(0, 4096) == pytest.approx(prefill, rel=1e-3)


def test_opt_13b_leaves_the_12_gib_of_kv_that_the_vllm_paper_has_on_a_40_gb_a100():
    # Kwon et al., SOSP '23, table 1: 26 GB of parameters, 12 GB for the KV cache, 15.7 K slots.
    place = Placement(model=model_named("opt-13b"), device=device_named("a100-40g"), dtype="fp16")
    slots = place.num_blocks(16) * 16
    assert place.weight_bytes == pytest.approx(26e9, rel=0.02)
    assert slots == pytest.approx(15_700, rel=0.06)
