"""`paged simulate`: a trace on a model, a device and a policy of your choice; or on several, side by side."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from paged.base.whole_file import whole_file
from paged.cli import options
from paged.cli.commands import with_options_of
from paged.cli.options import check_outputs
from paged.cli.scenario_options import device_document, files_of, scenarios as scenarios_of
from paged.cli.show import all_of, counting, print_json, say
from paged.cli.summary import over_budget, print_comparison, print_outcome, unsettled
from paged.errors import InvalidConfig
from paged.study.report import TraceEvents, write_csv, write_html, write_trace_events
from paged.study.simulator import ROUTERS, Outcome, Routing, Scenario, Step, decision_of, grid, outcome_of, run_all

_REPLICAS = "Replicas"
_ROUTING = Routing()


@with_options_of(scenarios_of)
def simulate(
    given: list[Scenario],
    price_per_hour: Annotated[float | None, Option(help="Price of a replica with all of its devices; gives the cost per million output tokens.", show_default="none", rich_help_panel=options.DEVICE)] = None,
    replicas: Annotated[int, Option(min=1, help="Replicas, each a pool and a scheduler of its own.", rich_help_panel=_REPLICAS)] = 1,
    router: Annotated[str, Option("--router", metavar="NAME[,…]", help=f"Router of requests among them: {', '.join(ROUTERS)} (docs/routing.md).", rich_help_panel=_REPLICAS)] = "exact",
    ingresses: Annotated[int, Option(min=1, help="Number of such routers; requests come to them in turn.", rich_help_panel=_REPLICAS)] = 1,
    event_delay: Annotated[float, Option("--event-delay", min=0.0, metavar="S", help="For exact: seconds until a replica's report arrives.", rich_help_panel=_REPLICAS)] = _ROUTING.delay_s,
    report_every: Annotated[float, Option("--report-every", min=0.0, metavar="S", help="For exact: seconds between two reports of a replica's load.", rich_help_panel=_REPLICAS)] = _ROUTING.report_s,
    seeds: Annotated[int, Option(min=1, help="Simulate with this many seeds, and show the spread.", rich_help_panel=options.TRACE)] = 1,
    jobs: options.Jobs = options.CORES,
    check: options.Check = False,
    csv: Annotated[Path | None, Option("--csv", help="Also write a table with a row for each simulation.", rich_help_panel=options.OUT)] = None,
    html: options.HtmlPath = None,
    trace_events: Annotated[Path | None, Option("--trace-events", help="Also write steps, memory and requests for Perfetto (one simulation only).", rich_help_panel=options.OUT)] = None,
    log: Annotated[Path | None, Option("--log", help="Also write every decision, a JSON line for each step (one simulation only).", rich_help_panel=options.OUT)] = None,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Simulate a trace through the real memory manager and scheduler, on a virtual clock, and report the results.

    Arrivals and lengths are the trace's. Nothing is computed: tokens come from a stand-in for the model. A step takes the time of the roofline
    of --model on --device (by measured kernels where they ship, else by published figures, docs/hardware.md), or the time by --profile, or without
    either max(weights + context · tokens attended to, token · tokens computed) + swap · tokens moved. --policy, --rate-scale, --blocks and
    --max-tokens-per-step take several values with commas; every combination is simulated, each in its own process.

    Example, three policies on a 13B model with 40 GB:

    `paged simulate azure --model llama-2-13b --device a100-40g --policy paged,vllm,fastgen --rate 0.7`

    With --replicas the load is dealt among several by --router, which takes several names, too.
    """
    routings = _routings(replicas, router, ingresses, event_delay, report_every)
    priced = [
        msgspec.structs.replace(scenario, price_per_hour=price_per_hour, routing=routing)
        for scenario in given
        for routing in routings
    ]
    scenarios = [seeded for scenario in priced for seeded in grid(scenario, seeds=seeds)]
    for name, path in (("--log", log), ("--trace-events", trace_events)):
        if path is not None and len(scenarios) > 1:
            raise InvalidConfig(f"{name} follows one simulation; {len(scenarios)} were asked for")
        if path is not None and replicas > 1:
            raise InvalidConfig(f"{name} follows one replica; {replicas} were asked for")
    if html is not None and replicas > 1:
        raise InvalidConfig(f"--html shows one replica over time; {replicas} were asked for")
    files = {"--csv": csv, "--html": html, "--trace-events": trace_events, "--log": log}
    check_outputs(files, files_of(given[0]))
    if len(scenarios) == 1:
        outcomes = [_watched(scenarios[0], check, log, trace_events)]
    else:
        outcomes = _side_by_side(scenarios, jobs, check, json)
    if csv is not None:
        write_csv(csv, outcomes)
    if html is not None:
        write_html(html, outcomes)
    _show(outcomes, json, is_one=len(scenarios) == 1)


def _routings(replicas: int, router: str, ingresses: int, event_delay: float, report_every: float) -> list[Routing]:
    """Return a routing for each router. Raises InvalidConfig, also for an option that one replica does not use."""
    names = [name.strip() for name in router.split(",")]
    found = [
        Routing(replicas=replicas, router=name, ingresses=ingresses, delay_s=event_delay, report_s=report_every)
        for name in names
    ]
    if replicas == 1 and found != [_ROUTING]:
        raise InvalidConfig("--router, --ingresses, --event-delay and --report-every go with --replicas of 2 or more")
    for each in found:
        each.check()
    return found


def _show(outcomes: list[Outcome], json: bool, *, is_one: bool = False) -> None:
    for warning in dict.fromkeys(map(_over_budget, outcomes)):
        if warning:
            say(warning)
    if json:
        print_json([as_document(outcome) for outcome in outcomes])
    elif is_one:
        print_outcome(outcomes[0])
    else:
        print_comparison(outcomes)
    violations = sum(outcome.result.violations for outcome in outcomes)
    if violations:
        first = next(message for outcome in outcomes for message in outcome.result.violation_messages)
        say(f"{violations} violations; the first: {first}")
        raise typer.Exit(options.VIOLATIONS_FOUND)


def _over_budget(outcome: Outcome) -> str:
    result, count = outcome.result, outcome.prompts_over_budget
    return over_budget(count, outcome.load.requests, result.policy, result.max_tokens_per_step or 0) if count else ""


def as_document(outcome: Outcome) -> dict[str, object]:
    """Return the JSON of a simulation: its figures, and its options."""
    scenario = outcome.scenario
    given = {
        "rate_scale": scenario.load.rate,
        "seed": scenario.load.seed,
        **device_document(scenario.device),
        "notes": [*filter(None, [unsettled(outcome.load)]), *scenario.device.notes()],
        "profile": scenario.device.profile,
        "clients": scenario.load.clients,
        "applied": outcome.applied,
        "load": outcome.load,
        "token_budget": scenario.max_tokens_per_step,
        "prompts_over_budget": outcome.prompts_over_budget,
    }
    return {**msgspec.to_builtins(outcome.result), **given}


def _watched(scenario: Scenario, check: bool, log: Path | None, trace_events: Path | None) -> Outcome:
    """Run one simulation in this process, with a progress bar of its requests."""
    simulation, events = scenario.started(check=check), TraceEvents()
    with ExitStack() as stack:
        watchers: list[Callable[[Step], object]] = [events.see] if trace_events is not None else []
        if log is not None:
            file = stack.enter_context(whole_file(log))
            watchers.append(lambda step: file.write(msgspec.json.encode(decision_of(step)).decode() + "\n"))
        advance = stack.enter_context(counting("requests", len(simulation.trace)))
        watchers.append(lambda step: advance(len(step.ended)))
        for step in simulation.steps():
            for see in watchers:
                see(step)
    outcome = outcome_of(scenario, simulation)
    if trace_events is not None:
        write_trace_events(trace_events, events, outcome)
    return outcome


def _side_by_side(scenarios: list[Scenario], jobs: int, check: bool, json: bool) -> list[Outcome]:
    """Run all simulations. After an interrupt it shows those that have ended."""
    with closing(run_all(scenarios, jobs=jobs, check=check)) as ended:
        found = all_of(ended, len(scenarios), "simulation", lambda found: _show(_in_order(found), json))
    return _in_order(found)


def _in_order(found: list[tuple[int, Outcome]]) -> list[Outcome]:
    return [outcome for _, outcome in sorted(found, key=itemgetter(0))]
