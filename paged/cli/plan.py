"""`paged plan`: the highest rate, the smallest memory or the fewest devices at which a trace meets its targets, and what binds."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.progress import TaskID, TimeElapsedColumn
from typer import Option

from paged.base.budget import as_bytes
from paged.base.words import counted
from paged.cli import options
from paged.cli.commands import with_options_of
from paged.cli.options import check_outputs
from paged.cli.scenario_options import device_document, files_of, scenarios as scenarios_of
from paged.cli.show import as_time, print_json, printed, progress_bar, say, table
from paged.cli.summary import described, over_budget, print_limits, unsettled
from paged.errors import InvalidConfig
from paged.study.report import PlanPage, write_plan_csv, write_plan_html
from paged.study.simulator import (
    UNBOUNDED,
    Binding,
    Effect,
    Find,
    Miss,
    P99s,
    Plan,
    Progress,
    Scenario,
    Targets,
    plans,
    what_binds,
)
from paged.study.simulator.trace_facts import per_second

_SEARCH = "The search"
_LATENCIES = {"ttft_s": "p99 first", "gap_s": "p99 gap", "itl_s": "p99 between"}
_NO_VALUE = ["–"] * len(_LATENCIES)
_HARDEST = {"rate": "highest rate", "memory": "smallest memory", "devices": "fewest replicas"}
_ANY = {"rate": "rate", "memory": "memory", "devices": "number of replicas"}
_END = {
    "rate": "the highest that is tried",
    "memory": "all that the longest request takes",
    "devices": "the least there is",
}


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


def as_document(plan: Plan, binding: Binding | None = None) -> dict[str, object]:
    """Return the JSON of a plan: the answer and what binds first, then the question and the tried values."""
    scenario, found = plan.scenario, msgspec.to_builtins(plan)
    del found["scenario"]
    asked = {
        "trace": scenario.load.trace,
        "policy": policy_of(scenario),
        "tensor_parallel": scenario.device.tensor_parallel,
        **device_document(scenario.device),
        "notes": [*filter(None, [unsettled(plan.load)]), *scenario.device.notes()],
        "rate_scale": scenario.load.rate,
        "seed": scenario.load.seed,
        "max_tokens_per_step": scenario.max_tokens_per_step,
    }
    first = {
        "find": plan.find,
        "answer": plan.answer,
        "missed": plan.missed,
        "requests_per_s": _per_s(plan, plan.answer) if plan.find == "rate" and plan.answer is not None else None,
        "best": plan.best.value,
        "cost_per_hour": plan.cost_per_hour,
        "cost_per_million_tokens": plan.cost_per_million_tokens,
        "binding": msgspec.to_builtins(binding),
    }
    probes = [{"met": probe.met, **shown} for probe, shown in zip(plan.probes, found["probes"])]
    return first | asked | found | {"probes": probes}


def in_order(plan: Plan) -> Plan:
    """Return a plan with its tried values in rising order."""
    return msgspec.structs.replace(plan, probes=tuple(sorted(plan.probes, key=lambda probe: probe.value)))


def print_probes(plan: Plan, why: Sequence[str] = ()) -> None:
    """Print all tried values, the answer if there is one, and then these lines."""
    columns = [*_value_columns(plan), *_LATENCIES.values(), "outcome", "steps", "took"]
    rows = [
        [
            *_value_cells(plan, probe.value),
            *_p99_cells(probe.p99),
            "; ".join(map(missed, probe.misses)) or "met",
            f"{probe.steps:,}",
            as_time(probe.wall_s),
        ]
        for probe in plan.probes
    ]
    outcome = columns.index("outcome")
    table(_title(plan), columns, rows, right=[i for i in range(len(columns)) if i != outcome])
    said = [] if plan.answer is None else [answer(plan), *remarks(plan)]
    for line in [
        *said[:1],
        *why,
        *said[1:],
        f"{described(plan.load)}.",
        f"Steps are timed by {plan.scenario.device.timed_by()}.",
    ]:
        printed(line)
    print_limits([plan.scenario], [plan.load])


def print_answers(plans: Sequence[Plan], binds: Sequence[str] = ()) -> None:
    """Print a line for each plan; all look for the same, with one trace. `binds`: a word for each plan, or none."""
    varied = [(name, value) for name, value in _VARIED if len({value(plan) for plan in plans}) > 1]
    columns = ["policy", *(name for name, _ in varied), *_value_columns(plans[0]), *_LATENCIES.values(), "misses at"]
    columns += ["binds"] if binds else []
    rows = []
    for place, plan in enumerate(plans):
        cells = [policy_of(plan.scenario), *(value(plan) for _, value in varied)]
        if plan.answer is None:
            cells += ["none", *_NO_VALUE[1 : len(_value_columns(plan))], *_NO_VALUE]
        else:
            cells += [*_value_cells(plan, plan.answer), *_p99_cells(plan.best.p99)]
        rows.append([*cells, "–" if plan.missed is None else _plain(plan.missed), *binds[place : place + 1]])
    table(_title(plans[0]), columns, rows, right=range(1, len(columns)))
    is_paced = len({plan.scenario.load.rate for plan in plans}) == 1
    printed(f"{described(plans[0].load, with_pace=is_paced)}.")
    print_limits([plan.scenario for plan in plans], [plan.load for plan in plans])


def answer(plan: Plan) -> str:
    """Return the answer in a sentence."""
    assert plan.answer is not None
    said = f"{_HARDEST[plan.find].capitalize()} with {targets_of(plan)}: {value_of(plan, plan.answer)}"
    if plan.missed is None:
        return f"{said}, {_END[plan.find]}."
    nearest = next(probe for probe in plan.probes if probe.value == plan.missed)
    return f"{said}; missed at {value_of(plan, plan.missed)}: {'; '.join(map(missed_by, nearest.misses))}."


def nothing_meets(plan: Plan) -> str:
    """Return a sentence: no value meets the targets, and by how much the nearest one misses."""
    best = plan.best
    said = f"with policy {policy_of(plan.scenario)} no {_ANY[plan.find]} meets {targets_of(plan)}"
    said += f"; nearest of {len(plan.probes)} tried is {value_of(plan, best.value)}, {'; '.join(map(missed_by, best.misses))}"
    if {miss.promise for miss in best.misses} & {"rejected", "cut_off"} and plan.find != "memory":
        said += f". The pool of {counted(plan.num_blocks, unit_of(plan))} cannot hold these requests whole; --context clips or leaves out what is longer"
    return said


def under_way(progress: Progress, value: float) -> str:
    """Return a line for a search that is trying this value."""
    # The latest probe that met and the latest that missed are the bracket's ends.
    ends = {
        probe.met: f", {_plain(probe.value)} {'meets' if probe.met else 'misses'}" for probe in progress.plan.probes
    }
    return f"{policy_of(progress.plan.scenario)}: trying {_plain(value)}{''.join(ends.values())}"


def missed(miss: Miss) -> str:
    """Return which target was missed."""
    if miss.promise == "rejected":
        return "requests rejected" if miss.found is None else f"{counted(int(miss.found), 'request')} rejected"
    if miss.promise == "cut_off":
        return f"{counted(int(miss.found or 0), 'output token')} cut off"
    return f"{_LATENCIES[miss.promise]} over {as_time(miss.limit)}"


def missed_by(miss: Miss) -> str:
    """Return which target was missed, and by how much if that is known."""
    if miss.found is None or miss.promise not in _LATENCIES:
        return missed(miss)
    over = f"{as_time(miss.found - miss.limit)} over {as_time(miss.limit)}"
    return f"{_LATENCIES[miss.promise]} {as_time(miss.found)}, {over}"


def targets_of(plan: Plan) -> str:
    """Return the targets of a plan."""
    promised = " and ".join(f"{_LATENCIES[name]} within {as_time(seconds)}" for name, seconds in plan.targets.given())
    return promised + (f", with each of {plan.seeds} seeds" if plan.seeds > 1 else "")


def value_of(plan: Plan, value: float) -> str:
    """Return a value with its unit, and what it amounts to."""
    if plan.find == "rate":
        return f"{per_second(_per_s(plan, value))} requests/s ({_plain(value)} × the trace's)"
    if plan.find == "memory":
        return counted(int(value), unit_of(plan)) + (f" ({_kv(plan, value)} of KV a device)" if plan.kv_bytes else "")
    degree = plan.scenario.device.tensor_parallel
    return counted(int(value), "replica") + (f" of {degree} devices" if degree > 1 else "")


def unit_of(plan: Plan) -> str:
    """Return the unit of a plan's memory."""
    return "page" if plan.groups else "block"


def policy_of(scenario: Scenario) -> str:
    """Return the name of a scenario's policy."""
    return scenario.policy if isinstance(scenario.policy, str) else scenario.policy.name


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _per_s(plan: Plan, rate: float) -> float:
    return rate * (plan.arrivals_per_s or 0.0)


def _kv(plan: Plan, value: float) -> str:
    return as_bytes(value * (plan.kv_bytes or 0))


def _title(plan: Plan) -> str:
    return f"{plan.scenario.load.trace}: {_HARDEST[plan.find]} with {targets_of(plan)}"


def _value_columns(plan: Plan) -> list[str]:
    if plan.find == "rate":
        return ["× trace", "requests/s"]
    if plan.find == "devices":
        return ["replicas"]
    return [f"{unit_of(plan)}s", *(["KV"] if plan.kv_bytes else [])]


def _value_cells(plan: Plan, value: float) -> list[str]:
    if plan.find == "rate":
        return [_plain(value), per_second(_per_s(plan, value))]
    return [_plain(value), _kv(plan, value)] if plan.find == "memory" and plan.kv_bytes else [_plain(value)]


def _p99_cells(p99: P99s | None) -> list[str]:
    if p99 is None:
        return _NO_VALUE
    return [as_time(getattr(p99, name)) for name in _LATENCIES]


def remarks(plan: Plan) -> list[str]:
    """Return remarks on the answer, a sentence a line."""
    best = plan.best
    quarters = ", ".join(map(as_time, best.ttft_by_quarter_s))
    lines = []
    if plan.cost_per_hour is not None:
        cost, each = plan.cost_per_hour, plan.cost_per_million_tokens
        tokens = "" if each is None else f", {each:,.3g} per million output tokens at the rate at which requests arrive"
        lines.append(f"Cost: {cost:,.2f} an hour{tokens}.")
    lines += [f"Median time to first token by quarter of the trace: {quarters}."]
    if plan.scenario.blocks is None:
        lines.append(f"The device has room for {counted(plan.num_blocks, unit_of(plan))}.")
    if plan.groups:
        lines.append(f"Blocks have {counted(plan.scenario.block_size, 'token')}; {'; '.join(plan.groups)}.")
    if plan.exceptions:
        values = ", ".join(_plain(probe.value) for probe in plan.exceptions)
        lines.append(f"More is not better here: {values} missed, too.")
    return lines


_VARIED: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("at", lambda plan: plan.load.pace(plan.scenario.load.rate)),
    ("of blocks", lambda plan: "all" if plan.scenario.blocks is None else f"{plan.scenario.blocks:,}"),
    ("budget", lambda plan: "none" if plan.scenario.budget() == UNBOUNDED else f"{plan.scenario.budget():,}"),
)
"""Columns beside the policy that may tell plans apart."""


def why(plan: Plan, binding: Binding | None) -> list[str]:
    """Return how the token budget was chosen and what binds, a sentence a line; `binding` None: without what binds."""
    said = [budget_of(plan), *([] if binding is None else binding_lines(plan, binding))]
    return [line for line in said if line]


def binds(binding: Binding) -> str:
    """Return what binds, in a word."""
    return binding.binds.knob if binding.binds is not None else "–"


def budget_of(plan: Plan) -> str:
    """Return how the token budget was chosen; "" if it was given, or is the policy's own."""
    weighed = plan.weighed
    if weighed is None:
        return ""
    budget = plan.scenario.budget()
    step = f"a full step takes about {as_time(weighed.step_s)}"
    if weighed.limit_s is not None:
        step += f", where {as_time(weighed.limit_s)} between two tokens are promised"
    if not weighed.against:
        # Nothing is harder than the answer, so no other budget could do better.
        return f"Token budget: {budget:,}, chosen: {step}."
    choices = [budget, *weighed.against]
    said = f"Token budget: {budget:,}, chosen from {min(choices):,} to {max(choices):,}: {step}"
    if budget != weighed.first:
        said += f"; the search began with {weighed.first:,}"
    better = "no other gives a better answer" if plan.answer is not None else "no other meets, either"
    return f"{said}; {better}."


def binding_lines(plan: Plan, binding: Binding) -> list[str]:
    """Return what binds, a sentence a line."""
    if binding.tried_at is None:
        return ["What binds: nothing; the answer is the last value there is."]
    changing = [effect for effect in binding.effects if effect.gain > 1]
    lines = []
    if binding.binds is None:
        lines.append(
            f"What binds: none by itself; with each of these steps {value_of(plan, binding.tried_at)} misses, too."
        )
    else:
        lines.append(f"What binds: {binding.binds.knob}; {effect_words(plan, binding.binds)}.")
        changing.remove(binding.binds)
    if changing:
        lines.append(f"Less so: {'; '.join(f'{effect.knob}, {effect_words(plan, effect)}' for effect in changing)}.")
    same = [step_words(plan, effect) for effect in binding.effects if effect.gain == 1]
    if same:
        lines.append(f"No change with {', '.join(same)}.")
    if binding.not_varied:
        lines.append(f"Not varied: {'; '.join(f'{knob} ({why})' for knob, why in binding.not_varied.items())}.")
    return lines


def effect_words(plan: Plan, effect: Effect) -> str:
    """Return what a step changed, and the answer with it."""
    assert effect.answer is not None
    return f"with {step_words(plan, effect)}: {value_of(plan, effect.answer)}"


def step_words(plan: Plan, effect: Effect) -> str:
    """Return what a step changed."""
    units = {"memory": f"{unit_of(plan)}s", "token budget": "tokens a step", "rows": "sequences"}
    if effect.knob in units:
        return f"{effect.becomes:,.0f} {units[effect.knob]} instead of {effect.was:,.0f}"
    if effect.knob == "host" and math.isinf(effect.becomes):
        return "no time for the host"
    return f"{effect.knob} × {effect.becomes:g}"
