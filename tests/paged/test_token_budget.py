"""Budgets that nobody named, and devices that are faster than they are."""

import math

import pytest

from paged.study.hardware import Faster, Roofline, StepWork, budgets, device_named, model_named, suiting_budget
from paged.study.simulator import Device, Load, Scenario, StepTime


def roofline(**options):
    return Roofline(model=model_named("llama-3-8b"), device=device_named("a100-80g"), **options)


def test_budgets_are_powers_of_two_in_whole_blocks():
    assert budgets(16) == (128, 256, 512, 1024, 2048, 4096, 8192)
    assert budgets(48) == (144, 288, 528, 1056, 2064, 4128, 8208)
    assert budgets(1024) == (1024, 2048, 4096, 8192)


def test_the_budget_that_suits_is_the_first_whose_step_takes_twice_as_long_as_one_token():
    step = roofline()
    seconds = {tokens: step.seconds(StepWork.of_rows([tokens], [tokens], sampled_rows=1)) for tokens in (1, 128, 256)}
    assert seconds[128] < 2 * seconds[1] <= seconds[256]
    assert suiting_budget(step, max_sequences=16, block_size=16) == 256
    h100 = Roofline(model=model_named("llama-3-8b"), device=device_named("h100"))
    assert suiting_budget(h100, max_sequences=16, block_size=16) == 512
    # One that never takes twice as long has the largest.
    assert suiting_budget(StepTime(token_us=0), max_sequences=16, block_size=16) == 8192
    # Half of it is left while every row decodes.
    budgets_of_rows = [suiting_budget(step, max_sequences=rows, block_size=16) for rows in (128, 129, 600, 100_000)]
    assert budgets_of_rows == [256, 512, 2048, 8192]


WORK = StepWork(computed_tokens=4096, sampled_rows=1, context_tokens=4096, attended_pairs=4096 * 2048)
DECODE = StepWork(computed_tokens=1, sampled_rows=1, context_tokens=4096, attended_pairs=4096)


def test_twice_the_arithmetic_or_bandwidth_halves_what_is_bound_by_it_and_no_more():
    plain, faster, wider = (
        roofline(host_overhead_s=0, faster=faster) for faster in (Faster(), Faster(arithmetic=2), Faster(bandwidth=2))
    )
    dense = plain.parts(WORK)[0]
    assert plain.seconds(WORK) - faster.seconds(WORK) > 0.49 * dense.flops / (312e12 * 0.6)
    assert faster.seconds(DECODE) == plain.seconds(DECODE)
    assert faster.costs(16).seconds_per_token == plain.costs(16).seconds_per_token / 2
    assert wider.seconds(DECODE) == pytest.approx(plain.seconds(DECODE) / 2)
    assert wider.knee_tokens == plain.knee_tokens / 2


def test_an_infinitely_fast_host_takes_no_time():
    plain = roofline()
    assert plain.seconds(DECODE) - roofline(faster=Faster(host=2)).seconds(DECODE) == pytest.approx(0.25e-3)
    assert roofline(faster=Faster(host=math.inf)).seconds(DECODE) == roofline(host_overhead_s=0).seconds(DECODE)


def test_a_formula_has_no_rates_that_could_be_others():
    assert not Device().can_be_faster
    device = Device(model="llama-3-8b", device="a100-80g", faster=Faster(host=2))
    assert device.can_be_faster
    assert device.cost_model().roofline.faster == Faster(host=2)


def test_without_a_model_the_budget_is_2048_and_of_a_policy_that_splits_nothing_its_own():
    def budget(policy, **options):
        return Scenario(load=Load(trace="azure"), policy=policy, blocks=99, **options).budget()

    assert budget("paged") == budget("sarathi") == 2048
    assert budget("tgi") == 4096
    with_model = Device(model="llama-3-8b", device="a100-80g")
    assert budget("paged", device=with_model, max_sequences=16) == 512
