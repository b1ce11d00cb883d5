"""A token budget chosen for targets: the one with the best answer of all that there are to choose from."""

from collections.abc import Generator, Iterable

import msgspec

from paged.errors import BudgetTooSmall
from paged.study.hardware import StepWork, budgets, suiting_budget
from paged.study.simulator.driver import Search
from paged.study.simulator.plan import Plan, Weighed
from paged.study.simulator.probe import Round
from paged.study.simulator.sought import Sought
from paged.study.simulator.targets import Targets
from paged.study.simulator.trial import Tally


def weighed_search(sought: Sought) -> Search[Plan]:
    """The plan with the best budget of all, to be driven. Raises BudgetTooSmall where not even the smallest leaves room for KV.

    The search goes with the budget that the cost model suggests. Then every other one has to meet at the nearest value that missed; one that
    does is better, and the search goes on with it. What misses is given up early, so that costs little.
    """
    choices = budgets(sought.scenario.block_size)
    limit = longest_step(sought.targets)
    first = _suggested(sought, choices, limit)
    plan = yield from at_budget(sought, first).search()
    plan, against = yield from improved(sought, plan, choices)
    return msgspec.structs.replace(
        plan, weighed=Weighed(first=first, step_s=full_step(sought, budget_of(plan)), limit_s=limit, against=against)
    )


def improved(
    sought: Sought, plan: Plan, choices: Iterable[int]
) -> Generator[Round, list[Tally], tuple[Plan, dict[int, bool]]]:
    """The best plan over these budgets beside the one that it has, and which of them met where the best before had missed; to be driven."""
    near = sorted(choices, key=lambda budget: max(budget / budget_of(plan), budget_of(plan) / budget))
    against: dict[int, bool] = {}
    for budget in near:
        # Without an answer, the easiest value is still to be met.
        harder = plan.best.value if plan.answer is None else plan.missed
        if budget == budget_of(plan) or harder is None:
            continue
        try:
            other = at_budget(sought, budget)
        except BudgetTooSmall:
            continue
        probe = yield from other.judged(harder)
        against[budget] = probe.met
        if probe.met:
            plan = yield from other.search(harder)
    return plan, dict(sorted(against.items()))


def at_budget(sought: Sought, budget: int) -> Sought:
    """The same search with so many tokens a step. Raises BudgetTooSmall where their activations leave no room for KV."""
    return sought.of(msgspec.structs.replace(sought.scenario, max_tokens_per_step=budget))


def budget_of(plan: Plan) -> int:
    """Tokens a step."""
    return plan.scenario.budget()


def longest_step(targets: Targets) -> float | None:
    """Seconds that a step may take where every one is as long: the smaller target between two tokens. None without one."""
    return min((seconds for name, seconds in targets.given() if name != "ttft_s"), default=None)


def full_step(sought: Sought, budget: int) -> float:
    """Seconds of a full step: a chunk of one prompt beside as many decodes as there are rows, room for and half the budget at most."""
    trace, scenario = sought.trace, at_budget(sought, budget).scenario
    prompt = float(trace.prompt_tokens.mean())
    length = max(1, round(prompt + float(trace.output_tokens.mean()) / 2))
    rows = max(1, min(scenario.rows_at(length), budget // 2))
    chunk = budget - rows
    cost_model = scenario.device.cost_model()
    work = StepWork.of_rows(
        [1] * rows + [chunk],
        [length] * rows + [max(chunk, round(prompt))],
        sampled_rows=float(rows),
        spans=cost_model.spans,
    )
    return float(cost_model.seconds(work))


def _suggested(sought: Sought, choices: tuple[int, ...], limit: float | None) -> int:
    """The largest budget whose full step is within the limit, or the smallest; without a limit what suits the cost model."""
    scenario = sought.scenario
    if limit is None:
        return suiting_budget(
            scenario.device.cost_model(), max_sequences=scenario.max_sequences, block_size=scenario.block_size
        )
    return max(
        (budget for budget in choices if _leaves_room(sought, budget) and full_step(sought, budget) <= limit),
        default=choices[0],
    )


def _leaves_room(sought: Sought, budget: int) -> bool:
    try:
        at_budget(sought, budget)
    except BudgetTooSmall:
        return False
    return True
