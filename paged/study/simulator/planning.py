"""The inverse of a simulation, asked: the highest rate, the smallest memory, the fewest devices; for one scenario or several side by side."""

from collections.abc import Sequence

from paged.errors import InvalidConfig
from paged.study.simulator.driver import Search, driven
from paged.study.simulator.plan import TOLERANCES, Find, Plan, Progress, Watching
from paged.study.simulator.scenario import Scenario
from paged.study.simulator.sought import Sought
from paged.study.simulator.targets import Targets
from paged.study.simulator.trial import trace_of
from paged.study.simulator.weighing import weighed_search


def highest_rate(
    scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1, tolerance: float | None = None
) -> Plan:
    """The highest rate at which the scenario's load meets the targets with every seed: its goodput, within 2 % unless said otherwise.

    Time is stretched (`Trace.scaled`). The search begins at the load's rate. Raises InvalidConfig for a load of which the rate changes nothing
    (a closed loop, all requests at once), for fewer than one seed or job, and for a tolerance that is none; and what scenarios raise.
    """
    (plan,) = plans("rate", [scenario], targets, seeds=seeds, jobs=jobs, tolerance=tolerance)
    return plan


def smallest_memory(
    scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1, tolerance: float | None = None
) -> Plan:
    """The fewest blocks with which the scenario's load meets the targets with every seed, within 1 % or one block unless said otherwise.

    The search begins at the scenario's blocks, and goes from what the longest request takes to what all requests take together. Raises
    InvalidConfig for fewer than one seed or job and for a tolerance that is none; and what scenarios raise.
    """
    (plan,) = plans("memory", [scenario], targets, seeds=seeds, jobs=jobs, tolerance=tolerance)
    return plan


def fewest_devices(scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1) -> Plan:
    """The fewest replicas of the scenario's device (`tensor_parallel` of them each) that meet the targets together with every seed.

    Each is a pool and a scheduler of its own, and requests are dealt to them in turn, in order of arrival. Percentiles are over all requests. Raises
    InvalidConfig for a closed loop and for fewer than one seed or job; and what scenarios raise.
    """
    (plan,) = plans("devices", [scenario], targets, seeds=seeds, jobs=jobs)
    return plan


def plans(
    find: Find,
    scenarios: Sequence[Scenario],
    targets: Targets,
    *,
    seeds: int = 1,
    jobs: int = 1,
    tolerance: float | None = None,
    watch: Watching | None = None,
) -> list[Plan]:
    """A plan for each scenario, in `jobs` processes: the same plans, whatever their number. `watch` is called before each probe and after the last.

    Where a scenario's token budget is "auto" and its policy splits prompts, budgets are weighed, and the plan is the best over them.

    Raises what `highest_rate`, `smallest_memory` and `fewest_devices` raise, before the first simulation as far as that can be.
    """
    if seeds < 1:
        raise InvalidConfig(f"{seeds} seeds were asked for; at least 1 is needed")
    if find not in TOLERANCES:
        raise InvalidConfig(f'"{find}" cannot be sought. Known are {", ".join(TOLERANCES)}')
    share = TOLERANCES[find] if tolerance is None else tolerance
    if not (0 < share < 1 or (share == 0 and find != "rate")):
        raise InvalidConfig(f"the tolerance is {share}; it must be a share between 0 and 1")
    try:
        begun = [
            Sought(find, scenario, targets, seeds, share, place, watch or (lambda _: None))
            for place, scenario in enumerate(scenarios)
        ]
        if find != "devices":
            # One trial at a time needs no process beside this one.
            jobs = min(jobs, max(1, len(scenarios) * seeds))
        return driven([_told(sought) for sought in begun], jobs=jobs)
    finally:
        # A file may be another one when the next plan is asked for.
        trace_of.cache_clear()


def _told(sought: Sought) -> Search[Plan]:
    """A search whose end is told, too."""
    weighs = sought.scenario.max_tokens_per_step == "auto" and sought.scenario.policy_rules().chunked
    plan = yield from weighed_search(sought) if weighs else sought.search()
    sought.watch(Progress(sought.place, plan, None))
    return plan
