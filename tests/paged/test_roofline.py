"""The cost model from published figures: its arithmetic by hand, its laws, and the memory that it leaves."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paged.study.hardware import Roofline, StepWork, device_named, model_named

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
    work = StepWork.of_rows(tokens, context, sampled_rows=draw(st.integers(0, len(tokens))))
    return msgspec.structs.replace(work, moved_tokens=draw(st.sampled_from([0, 16, 4096])))


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
