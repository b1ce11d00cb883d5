"""The inverse of a simulation: the highest rate, the smallest memory or the fewest devices, for several scenarios side by side."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from paged.base.fields import converted
from paged.errors import BudgetTooSmall, InvalidConfig
from paged.study.hardware import StepWork, budgets, suiting_budget
from paged.study.limits import at_least
from paged.study.simulator.ledger import groups_of
from paged.study.simulator.plan import TOLERANCES, Find, Plan, Probe, Progress, Targets, Watching, Weighed, scenario_at
from paged.study.simulator.scenario import Scenario, facts_of, prompts_over_budget
from paged.study.simulator.search import Axis, Counts, Rates, Value, search
from paged.study.simulator.trial import Round, Search, Trial, driven, trace_of
from paged.study.traces import Trace


def plans(
    find: Find,
    scenarios: Sequence[Scenario],
    targets: Targets,
    *,
    seeds: int = 1,
    jobs: int = 1,
    tolerance: float | None = None,
    watch: Watching = lambda progress: None,
) -> list[Plan]:
    """Return a plan for each scenario, found in `jobs` processes; their number changes no plan. Every seed has to meet the targets.

    "rate"     the highest rate at which the load meets them, its goodput, within 2 %. Time is stretched (`Trace.scaled`), from the load's own rate
    "memory"   the fewest blocks, within 1 % or one block, from what the longest request takes to what all requests take together
    "devices"  the fewest replicas of the scenario's device (`tensor_parallel` of them each). Each has its own pool and scheduler, requests are dealt
               to them in turn, and percentiles are over all requests

    `tolerance` replaces the share. `watch` is called before each probe and after the last. If a scenario's token budget is "auto" and its policy
    splits prompts, the plan is the best over all budgets.

    Raises InvalidConfig for a load whose rate changes nothing (a closed loop, all requests at once), for fewer than one seed or job and for a
    tolerance that is none, and what scenarios raise: before the first simulation where that is possible.
    """
    at_least("seeds", seeds, 1)
    converted("find", find, Find)
    share = TOLERANCES[find] if tolerance is None else tolerance
    converted("tolerance", share, Annotated[float, Meta(gt=0, lt=1) if find == "rate" else Meta(ge=0, lt=1)])
    try:
        begun = [
            PlanSearch(find, scenario, targets, seeds=seeds, tolerance=share, place=place, watch=watch)
            for place, scenario in enumerate(scenarios)
        ]
        if find != "devices":
            # More processes than trials at a time have nothing to do.
            jobs = min(jobs, max(1, len(scenarios) * seeds))
        return driven([_reported(plan_search) for plan_search in begun], jobs=jobs)
    finally:
        # Files may change before the next plan.
        trace_of.cache_clear()


def _reported(plan_search: "PlanSearch") -> Search[Plan]:
    """Search for a plan, with the best budget if budgets are weighed, and report its end."""
    weighs = plan_search.scenario.max_tokens_per_step == "auto" and plan_search.scenario.policy_rules().chunked
    plan = yield from weighed_search(plan_search) if weighs else plan_search.search()
    plan_search.watch(Progress(plan_search.place, plan, None))
    return plan


class PlanSearch:
    """A search over one scenario. Raises for a bad scenario before anything is simulated."""

    def __init__(
        self,
        find: Find,
        scenario: Scenario,
        targets: Targets,
        *,
        seeds: int,
        tolerance: float,
        place: int = 0,
        watch: Watching = lambda progress: None,
    ) -> None:
        if find != "memory" and scenario.load.clients is not None:
            raise InvalidConfig(
                f"clients is {scenario.load.clients}: a closed loop has no rate, and is not dealt to replicas; leave clients out"
            )
        scenario.scheduler()
        self.find, self.scenario, self.targets, self.seeds, self.tolerance = find, scenario, targets, seeds, tolerance
        self.place, self.watch = place, watch
        self._seeded = [msgspec.structs.replace(scenario, load=scenario.load.seeded(number)) for number in range(seeds)]
        self._traces = [trace_of(seeded.load) for seeded in self._seeded]
        if find == "rate" and self._arrivals_per_s() is None:
            raise InvalidConfig(f"all {len(self._traces[0]):,} requests arrive at once; no rate changes that")
        self._axis = self._axis_of()
        self._tried: dict[Value, Probe] = {}

    @property
    def trace(self) -> Trace:
        """The trace of the first seed."""
        return self._traces[0]

    def of(self, scenario: Scenario) -> "PlanSearch":
        """Return the same search over another scenario. Raises as for the first."""
        more: Any = {"seeds": self.seeds, "tolerance": self.tolerance, "place": self.place}
        return PlanSearch(self.find, scenario, self.targets, watch=self.watch, **more)

    def at_budget(self, budget: int) -> "PlanSearch | None":
        """Return the same search with so many tokens a step; None if their activations leave no room for KV."""
        try:
            return self.of(msgspec.structs.replace(self.scenario, max_tokens_per_step=budget))
        except BudgetTooSmall:
            return None

    def harder(self, answer: Value, share: float) -> Value:
        """Return a value that is harder than the answer by a share of it, but at least by one count, up to the hardest value."""
        if isinstance(self._axis, Rates):
            return float(f"{answer * (1 + share):.6g}")
        return max(self._axis.fewest, min(int(answer) - 1, int(answer * (1 - share))))

    def search(self, start: Value | None = None) -> Search[Plan]:
        """Search from the scenario's own value, or from `start`; for `driven`."""
        axis = self._axis if start is None else msgspec.structs.replace(self._axis, start=start)
        tries, probes = search(axis), list[Probe]()
        answer = missed = None
        try:
            value = next(tries)
            while True:
                probe = yield from self.probed(value, probes)
                probes.append(probe)
                if self.find != "memory" and {miss.promise for miss in probe.misses} & {"rejected", "cut_off"}:
                    # The pool is too small for a request; no rate and no further pool of that size changes that.
                    break
                value = tries.send(probe.met)
        except StopIteration as end:
            answer, missed = end.value
        probes.sort(key=lambda probe: probe.value)
        if answer is None:
            # A whole run of the easiest value shows by how much it misses.
            easiest = 0 if self.find == "rate" else -1
            if probes[easiest].p99 is None:
                probes[easiest] = yield from self.probed(probes[easiest].value, probes, gives_up=False)
        return self._plan(answer, missed, probes)

    def probed(self, value: Value, probes: Sequence[Probe] = (), *, gives_up: bool = True) -> Search[Probe]:
        """Try one value, for `driven`; a search does not try it again. `gives_up`: as soon as it can no longer meet."""
        known = self._tried.get(value)
        if known is not None and (gives_up or known.p99 is not None):
            return known
        self.watch(Progress(self.place, self._plan(None, None, probes), value))
        replicas = int(value) if self.find == "devices" else 1
        targets = self.targets if gives_up else None
        trials = tuple(
            Trial(scenario=scenario_at(self.find, seeded, value), replica=replica, replicas=replicas, targets=targets)
            for seeded in self._seeded
            for replica in range(replicas)
        )
        asked = Round(value, replicas, self.targets, trials)
        probe = self._tried[value] = asked.probe((yield asked))
        return probe

    def _axis_of(self) -> Axis:
        if self.find == "rate":
            return Rates(self.scenario.load.rate, self.tolerance)
        if self.find == "devices":
            return Counts(1, 1, min(map(len, self._traces)))
        layout = self.scenario.layout()
        # A pool smaller than the longest request rejects it, or cuts its output off.
        longest = max(int((trace.prompt_tokens + trace.output_tokens).max()) for trace in self._traces)
        fewest = layout.pages_for(longest) + layout.spare_pages
        most = max(_blocks_of_all(self.scenario, trace) for trace in self._traces)
        start = min(max(self.scenario.num_blocks(), fewest), most)
        return Counts(start, fewest, most, self.tolerance, turns=True)

    def _arrivals_per_s(self) -> float | None:
        trace, load = self._traces[0], self.scenario.load
        span = float(trace.arrival_s[-1]) * load.rate
        return len(trace) / span if span and load.clients is None else None

    def _plan(self, answer: Value | None, missed: Value | None, probes: Sequence[Probe]) -> Plan:
        return msgspec.structs.replace(self._untried, answer=answer, missed=missed, probes=tuple(probes))

    @cached_property
    def _untried(self) -> Plan:
        scenario, trace, roofline = self.scenario, self.trace, self.scenario.device.roofline()
        return Plan(
            find=self.find,
            scenario=scenario,
            targets=self.targets,
            seeds=self.seeds,
            tolerance=self.tolerance,
            answer=None,
            missed=None,
            probes=(),
            load=facts_of(scenario, trace),
            requests=len(trace) + trace.num_left_out,
            left_out=trace.num_left_out,
            prompts_over_budget=prompts_over_budget(scenario, trace),
            arrivals_per_s=self._arrivals_per_s(),
            num_blocks=scenario.num_blocks(),
            groups=groups_of(scenario.layout()),
            kv_bytes=None if roofline is None else roofline.page_bytes(scenario.block_size),
        )


def weighed_search(plan_search: PlanSearch) -> Search[Plan]:
    """Search for the plan with the best budget, for `driven`. Raises BudgetTooSmall if the suggested budget leaves no room for KV.

    The search begins with the budget that the cost model suggests. Then every other budget is tried at the nearest value that missed. One that meets
    is better, and the search goes on with it. Trials that miss end early, so they cost little.
    """
    choices = budgets(plan_search.scenario.block_size)
    # With steps of equal length, a step may take the smaller target between two tokens.
    limit = min((seconds for name, seconds in plan_search.targets.given() if name != "ttft_s"), default=None)
    first = _suggested(plan_search, choices, limit)
    # Raises if its activations leave no room for KV.
    begun = plan_search.of(msgspec.structs.replace(plan_search.scenario, max_tokens_per_step=first))
    plan, against = yield from improved(plan_search, (yield from begun.search()), choices)
    step_s = _full_step(plan.scenario, plan_search.trace)
    return msgspec.structs.replace(plan, weighed=Weighed(first=first, step_s=step_s, limit_s=limit, against=against))


def improved(plan_search: PlanSearch, plan: Plan, choices: Iterable[int]) -> Search[tuple[Plan, dict[int, bool]]]:
    """Search for the best plan over these budgets and the plan's own, for `driven`. Return it, and by budget whether it met where the best before had
    missed."""
    own = plan.scenario.budget()
    against: dict[int, bool] = {}
    for budget in sorted(choices, key=lambda budget: max(budget / own, own / budget)):
        # Without an answer, the easiest value has to be met.
        harder = plan.best.value if plan.answer is None else plan.missed
        if budget == plan.scenario.budget() or harder is None or (other := plan_search.at_budget(budget)) is None:
            continue
        against[budget] = (yield from other.probed(harder)).met
        if against[budget]:
            plan = yield from other.search(harder)
    return plan, dict(sorted(against.items()))


def _suggested(plan_search: PlanSearch, choices: tuple[int, ...], limit: float | None) -> int:
    """Return the largest budget whose full step is within the limit, or the smallest; without a limit the one that suits the cost model."""
    scenario = plan_search.scenario
    if limit is None:
        return suiting_budget(
            scenario.device.cost_model(), max_sequences=scenario.max_sequences, block_size=scenario.block_size
        )
    found = [other.scenario for budget in choices if (other := plan_search.at_budget(budget)) is not None]
    short = [each.budget() for each in found if _full_step(each, plan_search.trace) <= limit]
    return max(short, default=choices[0])


def _full_step(scenario: Scenario, trace: Trace) -> float:
    """Return the seconds of a full step: a chunk of one prompt beside as many decodes as rows, memory and half of the budget allow."""
    prompt, budget = float(trace.prompt_tokens.mean()), scenario.budget()
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


def _blocks_of_all(scenario: Scenario, trace: Trace) -> int:
    """Return the blocks of all requests together at their declared lengths, or of all rows at the context's length in regions of a power of two.

    With so many, no request waits for memory, and nothing cached is evicted.
    """
    lengths = trace.prompt_tokens + np.maximum(trace.output_tokens, trace.max_tokens)
    layout = scenario.layout()
    # Blocks that windows have passed stay cached, so windows count as full.
    each = -(-lengths // scenario.block_size) * layout.block_pages + layout.state_pages + layout.spare_pages
    longest = max(int(each.max()), layout.pages_for(scenario.load.context or 0))
    return max(int(each.sum()), 2 * longest * min(len(trace), scenario.max_sequences))
