"""Token budgets that nobody named, devices that are faster than they are, and what binds a plan."""

import math

import msgspec
import pytest

from paged.study.hardware import Faster, Roofline, StepWork, budgets, device_named, model_named, suiting_budget
from paged.study.simulator import Device, Load, Scenario, StepTime, Targets, plans, what_binds

REPLACE = msgspec.structs.replace
ON_A100 = Device(model="llama-3-8b", device="a100-80g")
AZURE = Load(trace="azure", limit=30, rate=40, context=8192)
TARGETS = Targets(ttft_s=1.0, gap_s=0.05)


def planned(find, scenario, targets=TARGETS, **options):
    (plan,) = plans(find, [scenario], targets, **options)
    return plan


def scenario_of(**options):
    return Scenario(load=AZURE, device=ON_A100, **options)


@pytest.fixture(scope="module")
def two_replicas():
    return planned("devices", scenario_of())


def test_the_weighed_budget_has_the_best_answer_of_all_budgets(two_replicas):
    plan = two_replicas
    some = {budgets(16)[0], budgets(16)[-1], plan.scenario.max_tokens_per_step}
    alone = {budget: planned("devices", scenario_of(max_tokens_per_step=budget)).answer for budget in some}
    assert (plan.answer, alone[plan.scenario.max_tokens_per_step]) == (min(alone.values()), plan.answer)
    assert max(alone.values()) > plan.answer
    weighed = plan.weighed
    assert weighed.limit_s == 0.05
    assert weighed.step_s < 0.05
    assert set(weighed.against) | {plan.scenario.max_tokens_per_step} >= set(budgets(16))


# Six rows of a token each, 20 ms a step, and requests that come at once.
CROWD = "synthetic:poisson,rate=20,requests=30,prompt=40,output=12"
SLOW = Device(formula=StepTime(weights_ms=20, context_us=1, token_us=200))


def small(**options):
    usual = {"blocks": 400, "block_size": 4, "max_tokens_per_step": 128, "max_sequences": 64}
    return Scenario(load=Load(trace=CROWD), device=SLOW, **{**usual, **options})


def test_what_is_scarce_binds_and_its_effect_is_what_a_plan_with_more_of_it_finds():
    """Of two plans, asked about together."""
    scarce = {"rows": ("max_sequences", 2), "memory": ("blocks", 30)}
    targets = Targets(ttft_s=0.5)
    found = [planned("rate", small(**{option: few}), targets, tolerance=0.1) for option, few in scarce.values()]
    for (knob, (option, few)), plan, binding in zip(scarce.items(), found, what_binds(found), strict=True):
        assert binding.binds.knob == knob
        with_more = planned("rate", small(**{option: 2 * few}), targets, tolerance=0.1)
        assert binding.binds.answer == pytest.approx(with_more.answer, rel=0.1)
        assert binding.binds.gain == pytest.approx(binding.binds.answer / plan.answer)
        assert binding.binds.gain > 1.1
        assert set(binding.not_varied) == {"arithmetic", "bandwidth", "host"}


def test_where_nothing_meets_the_budget_that_would_is_said():
    """A lone prompt of 2,000 tokens takes 0.4 s in one step, and another request decodes meanwhile."""
    load = Load(trace="synthetic:deterministic,rate=1,requests=6,prompt=2000,output=60")
    plan = planned("devices", REPLACE(small(blocks=9000, max_tokens_per_step=4096), load=load), Targets(ttft_s=0.3))
    assert plan.answer is None
    (binding,) = what_binds([plan])
    assert binding.tried_at == plan.best.value == 6
    assert binding.binds is None
    assert {effect.answer for effect in binding.effects} == {None}
    slow = Device(model="llama-3-8b", device="a100-80g", published=True)
    tight = planned("devices", REPLACE(plan.scenario, device=slow, blocks=None), Targets(ttft_s=0.15))
    (binding,) = what_binds([tight])
    assert tight.answer is None
    assert (binding.binds.knob, binding.binds.gain) == ("arithmetic", math.inf)


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
