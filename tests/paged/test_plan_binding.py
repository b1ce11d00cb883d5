"""The token budget of a plan, and what binds it."""

import math

import msgspec
import pytest

from paged.study.hardware import Faster, budgets
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


def test_a_formula_has_no_rates_that_could_be_others():
    assert not Device().can_be_faster
    device = Device(model="llama-3-8b", device="a100-80g", faster=Faster(host=2))
    assert device.can_be_faster
    assert device.cost_model().roofline.faster == Faster(host=2)
