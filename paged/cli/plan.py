"""`paged plan`: the highest rate, the smallest memory or the fewest devices at which a trace meets its targets."""

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.progress import TaskID, TimeElapsedColumn
from typer import Option

from paged.base.words import counted
from paged.cli import options
from paged.cli.commands import with_options_of
from paged.cli.options import check_outputs
from paged.cli.plan_words import (
    answer,
    as_document,
    binds,
    in_order,
    nothing_meets,
    policy_of,
    print_answers,
    print_probes,
    remarks,
    under_way,
    why,
)
from paged.cli.scenario_options import files_of, scenarios as scenarios_of
from paged.cli.show import print_json, progress_bar, say
from paged.cli.trace_words import described, over_budget, unsettled
from paged.errors import InvalidConfig
from paged.study.report import PlanPage, write_plan_csv, write_plan_html
from paged.study.simulator import Binding, Find, Plan, Progress, Scenario, Targets, plans, what_binds

_SEARCH = "The search"


@with_options_of(scenarios_of)
def plan(
    given: list[Scenario],
    find: Annotated[Literal["rate", "memory", "devices"], Option("--find", help="The highest rate, the smallest memory (blocks), or the fewest devices (replicas, to which requests are dealt in turn).", show_default=False, rich_help_panel=_SEARCH)],
    ttft: Annotated[float | None, Option("--ttft", metavar="S", help="Target: p99 of the time to first token, in seconds.", show_default="no target", rich_help_panel=_SEARCH)] = None,
    gap: Annotated[float | None, Option("--gap", metavar="S", help="Target: p99 of each request's longest time between two tokens, in seconds.", show_default="no target", rich_help_panel=_SEARCH)] = None,
    itl: Annotated[float | None, Option("--itl", metavar="S", help="Target: p99 of all times between two tokens, in seconds. It hides the cost of preemptions; --gap does not.", show_default="no target", rich_help_panel=_SEARCH)] = None,
    tolerance: Annotated[float | None, Option(help="Largest distance of the answer from the nearest value that misses, as a share.", show_default="0.02 of a rate; 0.01 of a memory, or one block", rich_help_panel=_SEARCH)] = None,
    price_per_hour: Annotated[float | None, Option("--price-per-hour", help="Price of a replica with all of its devices; gives the cost of the answer per hour and per million output tokens.", show_default="none", rich_help_panel=options.DEVICE)] = None,
    seeds: Annotated[int, Option("--seeds", min=1, help="The targets have to be met with each of this many seeds.", rich_help_panel=_SEARCH)] = 1,
    explain: Annotated[bool, Option("--explain/--no-explain", help="Also find the limit that binds the answer: raise each one a step, and compare.", rich_help_panel=_SEARCH)] = True,
    jobs: options.Jobs = options.CORES,
    csv: Annotated[Path | None, Option("--csv", help="Also write a table with a row for each tried value.", rich_help_panel=options.OUT)] = None,
    html: options.HtmlPath = None,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Find the highest rate, the smallest memory or the fewest devices at which a trace meets its targets.

    It simulates as `paged simulate` does. The value is doubled or halved until it meets the targets on one side and misses on the other, then
    the bracket is cut. A simulation ends as soon as it cannot meet the targets any more. Then memory, token budget, rows and the device's
    rates are raised a step, one at a time, to find what binds. A search begins at --rate-scale or --blocks, or at what the device has.
    --policy and --max-tokens-per-step take several values with commas, and so does the one of --rate-scale and --blocks that is not the
    answer; every combination is planned. Status 1 if no value meets the targets.

    Example, the highest rate at which 99 of 100 requests begin to answer within 10 s and never pause for over 1 s:

    `paged plan azure --model llama-2-13b --device a100-40g --find rate --ttft 10 --gap 1`
    """
    targets = Targets(ttft_s=ttft, gap_s=gap, itl_s=itl)
    if find == "devices" and tolerance is not None:
        raise InvalidConfig("--tolerance is of a rate or a memory; devices are found exactly")
    if find == "rate":
        # The search tries higher rates than the one that it begins with.
        given = [scenario.settled() for scenario in given]
        _must_be_one("--rate-scale or --rate", {scenario.load.rate for scenario in given})
    elif find == "memory":
        _must_be_one("--blocks", {scenario.blocks for scenario in given})
    files = {"--csv": csv, "--html": html}
    check_outputs(files, files_of(given[0]))
    priced = [msgspec.structs.replace(scenario, price_per_hour=price_per_hour) for scenario in given]
    found = _planned(find, priced, targets, seeds=seeds, jobs=jobs, tolerance=tolerance, json=json)
    bindings = _bindings(found, jobs, json) if explain else [None] * len(found)
    explained = list(zip(found, bindings))
    for plan in found:
        if plan.prompts_over_budget:
            budget = plan.scenario.budget()
            say(over_budget(plan.prompts_over_budget, plan.load.requests, policy_of(plan.scenario), budget))
    if csv is not None:
        write_plan_csv(csv, found)
    if html is not None:
        write_plan_html(html, [_as_page(plan, binding) for plan, binding in explained])
    if json:
        print_json([as_document(plan, binding) for plan, binding in explained])
    elif len(found) == 1:
        print_probes(found[0], why(found[0], bindings[0]))
    else:
        print_answers(found, [binds(binding) for binding in bindings if binding is not None])
    unmet = [plan for plan in found if plan.answer is None]
    for plan in unmet:
        say(nothing_meets(plan))
    if unmet:
        raise typer.Exit(options.TARGETS_MISSED)


def _bindings(found: list[Plan], jobs: int, json: bool) -> list[Binding]:
    """Return what binds each plan. After an interrupt it shows the plans without."""
    bar = progress_bar(TimeElapsedColumn())
    try:
        with bar or nullcontext():
            if bar is not None:
                bar.add_task("what binds", total=None)
            return what_binds(found, jobs=jobs)
    except KeyboardInterrupt:
        if json:
            print_json([as_document(plan) for plan in found])
        else:
            for plan in found:
                print_probes(plan, why(plan, None))
        say("interrupted; what binds is not known")
        raise


def _as_page(plan: Plan, binding: Binding | None) -> PlanPage:
    """Return a plan with its sentences, for the page."""
    said = nothing_meets(plan) if plan.answer is None else answer(plan)
    more = [] if plan.answer is None else remarks(plan)
    device = plan.scenario.device
    limits = [
        *filter(None, [unsettled(plan.load)]),
        *device.notes(),
        *(f"Not modelled: {each}" for each in device.not_modelled()),
    ]
    return PlanPage(plan, said, (*why(plan, binding), *more, described(plan.load), *limits))


def _must_be_one(option: str, values: Collection[object]) -> None:
    if len(values) > 1:
        raise InvalidConfig(f"{option} says where the search begins, so it takes one value; {len(values)} were given")


def _planned(
    find: Find,
    scenarios: list[Scenario],
    targets: Targets,
    *,
    seeds: int,
    jobs: int,
    tolerance: float | None,
    json: bool,
) -> list[Plan]:
    """Return the plans, with a line for each search while it runs. After an interrupt it shows what was tried."""
    bar = progress_bar(TimeElapsedColumn())
    lines: dict[int, TaskID] = {}
    tried: dict[int, Plan] = {}

    def watch(progress: Progress) -> None:
        tried[progress.place] = progress.plan
        if bar is None:
            return
        line = lines.get(progress.place)
        if line is None:
            line = lines[progress.place] = bar.add_task("", total=None)
        if progress.value is None:
            bar.update(line, visible=False)
        else:
            bar.update(line, visible=True, description=under_way(progress, progress.value))

    try:
        with bar or nullcontext():
            return plans(find, scenarios, targets, seeds=seeds, jobs=jobs, tolerance=tolerance, watch=watch)
    except KeyboardInterrupt:
        begun = [in_order(plan) for _, plan in sorted(tried.items()) if plan.probes]
        if json and begun:
            print_json([as_document(plan) for plan in begun])
        elif not json:
            for plan in begun:
                print_probes(plan)
        num_probes = sum(len(plan.probes) for plan in begun)
        say(f"interrupted; {counted(num_probes, 'value')} had been tried, and there is no answer")
        raise
