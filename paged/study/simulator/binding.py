"""What binds a plan's answer: the answer with one thing relaxed by a step, and everything else as it is."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import msgspec

from paged.errors import BudgetTooSmall
from paged.study.hardware import budgets
from paged.study.simulator.ledger import UNBOUNDED
from paged.study.simulator.plan import Find, Plan
from paged.study.simulator.planning import PlanSearch, improved
from paged.study.simulator.scenario import Scenario
from paged.study.simulator.search import Value
from paged.study.simulator.trial import Search, driven, trace_of

Knob = Literal["memory", "token budget", "rows", "arithmetic", "bandwidth", "host"]
_STEP_OF_DEVICE = 1.25
"""Factor on arithmetic and on bandwidth, about that between two devices of a generation."""
_STEP_OF_ANSWER: dict[Find, float] = {"rate": 0.1, "memory": 0.1, "devices": 0.0}
"""The share by which an answer has to be harder to count as another one; for devices it is one replica."""

_with = msgspec.structs.replace


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One thing, relaxed by a step.

    was, becomes  blocks, tokens a step, or sequences; for arithmetic and bandwidth a factor on the device's own, for the host the divisor of its
                  share of a step
    answer        of the relaxed plan; None: still nothing meets
    gain          how many times better it is: as high a rate, or as small a memory or number of devices. 1: no change, or less than a tenth (for
                  devices, less than a replica); infinite: nothing met without the step
    """

    knob: Knob
    was: float
    becomes: float
    answer: Value | None
    gain: float


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What binds a plan's answer.

    effects     of every step that was tried
    binds       the effect with the largest gain; None: no step changes the answer by itself
    tried_at    the value at which each step was tried first, harder than the answer; None: there is no harder value, and no step was tried
    not_varied  what could not be relaxed, and why
    """

    effects: tuple[Effect, ...]
    binds: Effect | None
    tried_at: Value | None
    not_varied: dict[Knob, str]


def what_binds(plans: Sequence[Plan], *, jobs: int = 1) -> list[Binding]:
    """Find what binds each plan, in `jobs` processes. Steps are memory, rows and the token budget doubled, the budget halved, arithmetic and bandwidth
    1.25 times as fast, and no time for the host; if a token budget was named, also the best of all others.

    Each step costs a simulation that mostly ends early, and a search if it helps. Raises what the plans' searches raise.
    """
    try:
        searches = [_searches(plan) for plan in plans]
        found = iter(driven([search for several in searches for search in several], jobs=jobs))
        return [
            _binding(plan, [effect for effect in islice(found, len(several)) if effect is not None])
            for plan, several in zip(plans, searches)
        ]
    finally:
        # Files may change before the next plan.
        trace_of.cache_clear()


def _searches(plan: Plan) -> list[Search[Effect | None]]:
    harder = _tried_at(plan)
    if harder is None:
        return []
    searches = [_effect(plan, harder, *step) for step in _steps(plan)]
    is_named = plan.weighed is None and plan.scenario.policy_rules().chunked
    return [*searches, _best_budget(plan)] if is_named else searches


def _steps(plan: Plan) -> list[tuple[Knob, float, float, Scenario]]:
    """Return each thing that is relaxed, what it was and becomes, and the scenario with it."""
    scenario, steps = plan.scenario, list[tuple[Knob, float, float, Scenario]]()
    if plan.find != "memory":
        blocks = 2 * plan.num_blocks
        steps.append(("memory", plan.num_blocks, blocks, _with(scenario, blocks=blocks)))
    budget = scenario.budget()
    for other in _next_budgets(scenario):
        steps.append(("token budget", budget, other, _with(scenario, max_tokens_per_step=other)))
    rows = scenario.max_sequences
    steps.append(("rows", rows, 2 * rows, _with(scenario, max_sequences=2 * rows)))
    if scenario.device.can_be_faster:
        faster = scenario.device.faster
        step = _STEP_OF_DEVICE
        if plan.find == "devices" and plan.answer is not None and plan.answer > 1:
            # With few devices, one fewer leaves each of the others more extra work than the usual step.
            step = max(step, plan.answer / (plan.answer - 1))
        of_device: dict[Knob, float] = {"arithmetic": step, "bandwidth": step, "host": math.inf}
        for knob, factor in of_device.items():
            was = getattr(faster, knob)
            device = _with(scenario.device, faster=_with(faster, **{knob: was * factor}))
            relaxed = _with(scenario, device=device)
            if knob == "arithmetic" and plan.weighed is not None:
                # The planner would have chosen a larger budget: full steps with so many more tokens take as long as before.
                size = scenario.block_size
                relaxed = _with(relaxed, max_tokens_per_step=int(budget * factor) // size * size)
            steps.append((knob, was, was * factor, relaxed))
    return steps


def _next_budgets(scenario: Scenario) -> list[int]:
    """Return half the budget, in whole blocks, and twice; nothing for a policy without a budget."""
    budget, size = scenario.budget(), scenario.block_size
    if budget == UNBOUNDED:
        return []
    half = max(1, budget // 2 // size) * size
    return [2 * budget] if half >= budget else [half, 2 * budget]


def _search_over(plan: Plan, scenario: Scenario) -> PlanSearch:
    return PlanSearch(plan.find, scenario, plan.targets, seeds=plan.seeds, tolerance=plan.tolerance)


def _tried_at(plan: Plan) -> Value | None:
    if plan.answer is None:
        return plan.best.value
    if plan.missed is None:
        return None
    return _search_over(plan, plan.scenario).harder(plan.answer, _STEP_OF_ANSWER[plan.find])


def _effect(
    plan: Plan, harder: Value, knob: Knob, was: float, becomes: float, relaxed: Scenario
) -> Search[Effect | None]:
    """Return the effect of a step; None if the activations of so many tokens leave no room for KV."""
    try:
        plan_search = _search_over(plan, relaxed)
    except BudgetTooSmall:
        return None
    answer = plan.answer
    if (yield from plan_search.probed(harder)).met:
        answer = (yield from plan_search.search(harder)).answer
    return Effect(knob=knob, was=was, becomes=becomes, answer=answer, gain=_gain(plan, answer))


def _best_budget(plan: Plan) -> Search[Effect | None]:
    """Return the effect of the best budget beside the next ones; None if none is better than the named one."""
    scenario = plan.scenario
    others = [budget for budget in budgets(scenario.block_size) if budget not in _next_budgets(scenario)]
    best, _ = yield from improved(_search_over(plan, scenario), plan, others)
    gain = _gain(plan, best.answer)
    if gain == 1:
        return None
    return Effect(
        knob="token budget", was=scenario.budget(), becomes=best.scenario.budget(), answer=best.answer, gain=gain
    )


def _gain(plan: Plan, answer: Value | None) -> float:
    if answer is None or answer == plan.answer:
        return 1.0
    if plan.answer is None:
        return math.inf
    gain = answer / plan.answer if plan.find == "rate" else plan.answer / answer
    return gain if gain >= 1 + _STEP_OF_ANSWER[plan.find] else 1.0


def _binding(plan: Plan, effects: list[Effect]) -> Binding:
    changing = [effect for effect in effects if effect.gain > 1]
    not_varied: dict[Knob, str] = {}
    if plan.find == "memory":
        not_varied["memory"] = "it is the answer itself"
    if plan.scenario.budget() == UNBOUNDED:
        not_varied["token budget"] = "the policy has none"
    if not plan.scenario.device.can_be_faster:
        timed = "a formula" if plan.scenario.device.profile is None else "steps that were timed"
        not_varied |= dict.fromkeys(("arithmetic", "bandwidth", "host"), f"time is by {timed}")
    # If nothing met, all gains are infinite, but the answers differ.
    sign = 1 if plan.find == "rate" else -1
    return Binding(
        effects=tuple(effects),
        binds=max(changing, key=lambda effect: sign * (effect.answer or 0), default=None),
        tried_at=_tried_at(plan),
        not_varied=not_varied,
    )
