"""What binds a plan is told by plans of their own, and a token budget that nobody named is the best of all."""

import math

import msgspec
import pytest

from paged.study.hardware import budgets
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


def test_a_search_that_begins_with_a_worse_budget_ends_with_the_best():
    """Without a target between tokens the search begins with what suits the device; long steps serve prompts sooner."""
    plan = planned("rate", scenario_of(), Targets(ttft_s=0.5), tolerance=0.1)
    first = planned("rate", scenario_of(max_tokens_per_step=plan.weighed.first), Targets(ttft_s=0.5), tolerance=0.1)
    assert plan.weighed.limit_s is None
    assert plan.weighed.first == 512
    assert plan.answer >= first.answer
    assert first.weighed is None


def test_the_budget_of_a_policy_that_splits_no_prompt_is_not_weighed():
    plan = planned("rate", scenario_of(policy="tgi"), Targets(ttft_s=5), tolerance=0.5)
    assert plan.weighed is None
    assert plan.scenario.max_tokens_per_step == "auto"


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


@pytest.mark.parametrize(
    ("knob", "trace"), [("bandwidth", "prompt=1,output=400"), ("arithmetic", "prompt=4000,output=2")]
)
def test_rates_of_the_device_bind_where_nothing_else_is_scarce(knob, trace):
    load = Load(trace=f"synthetic:poisson,rate=2,requests=12,{trace}")
    targets = Targets(itl_s=0.012) if knob == "bandwidth" else Targets(ttft_s=1.0)
    plan = planned("rate", Scenario(load=load, device=ON_A100, max_tokens_per_step=512), targets, tolerance=0.1)
    (binding,) = what_binds([plan])
    gains = {effect.knob: effect.gain for effect in binding.effects if effect.knob != "token budget"}
    assert max(gains, key=gains.get) == knob
    assert gains["memory"] == gains["rows"] == 1


def test_of_two_replicas_the_rates_are_made_twice_as_fast(two_replicas):
    plan = two_replicas
    (binding,) = what_binds([plan])
    assert all(effect.gain == plan.answer / effect.answer for effect in binding.effects)
    assert binding.tried_at == plan.answer - 1
    steps = {effect.knob: effect.becomes for effect in binding.effects}
    assert set(steps) == {"memory", "token budget", "rows", "arithmetic", "bandwidth", "host"}
    assert steps["arithmetic"] == steps["bandwidth"] == max(1.25, plan.answer / (plan.answer - 1))
    assert steps["host"] == math.inf


def test_where_no_step_helps_nothing_binds_by_itself():
    """A lone prompt a replica, and a gap that the host alone would exceed."""
    plan = planned("rate", small(), Targets(ttft_s=0.8))
    plan = REPLACE(plan, scenario=REPLACE(plan.scenario, device=Device()), answer=1e4)
    (binding,) = what_binds([plan])
    assert binding.binds is None
    assert all(effect.gain == 1 and effect.answer == plan.answer for effect in binding.effects)


def test_an_answer_at_the_end_of_its_axis_is_bound_by_nothing():
    plan = planned(
        "devices",
        REPLACE(small(), load=Load(trace="synthetic:poisson,rate=1,requests=4,prompt=8,output=2")),
        Targets(ttft_s=9),
    )
    (binding,) = what_binds([plan])
    assert plan.answer == 1
    assert (binding.effects, binding.binds, binding.tried_at) == ((), None, None)


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


def test_memory_is_not_varied_where_it_is_sought():
    plan = planned("memory", small(), Targets(ttft_s=0.8), tolerance=0.05)
    (binding,) = what_binds([plan])
    assert binding.not_varied["memory"] == "it is what is sought"
    assert "memory" not in {effect.knob for effect in binding.effects}
