"""Results of simulations, and their traces, as text."""

import math
from collections.abc import Callable, Sequence

from paged.cli.show import as_time, figures, printed, table
from paged.study.simulator import (
    Lengths,
    Outcome,
    Percentiles,
    Scenario,
    SimulationResult,
    Spread,
    TraceFacts,
    by_seed,
    interval,
)
from paged.study.simulator.trace_facts import per_second


def print_summary(result: SimulationResult) -> None:
    """Print the figures of one simulation."""
    figures(_title(result), summary(result))


def print_outcome(outcome: Outcome) -> None:
    """Print the figures of one simulation, its trace, its notes, and whether its token budget was chosen."""
    result, scenario = outcome.result, outcome.scenario
    is_chosen = scenario.max_tokens_per_step == "auto" and scenario.policy_rules().chunked
    lines = [(name, f"{text}, chosen" if is_chosen and name == "steps" else text) for name, text in summary(result)]
    notes = [("note", note) for note in scenario.device.notes()]
    if said := unsettled(outcome.load):
        notes.insert(0, ("note", said))
    notes += [("not modelled", each) for each in scenario.device.not_modelled()]
    figures(
        _title(result),
        [("trace", described(outcome.load)), ("steps are timed by", scenario.device.timed_by()), *notes, *lines],
    )


def print_comparison(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each simulation. Those that differ only in their seed share a line: the mean, and half of its 95 % interval."""
    groups = by_seed(outcomes)
    columns = [
        "policy",
        *(name for name, is_shown, _ in _VARIED if is_shown(outcomes)),
        *(name for name, _ in _COMPARED),
    ]
    rows = []
    for group in groups:
        first = group[0]
        cells = [first.result.policy, *(value(first) for _, is_shown, value in _VARIED if is_shown(outcomes))]
        rows.append(cells + [cell([outcome.result for outcome in group]) for _, cell in _COMPARED])
    trace = outcomes[0].result.trace
    seeds = len(groups[0])
    title = f"{trace}: {len(groups)} simulations"
    if seeds > 1:
        varies = any("±" in cell for row in rows for cell in row)
        title += f", {seeds} seeds each, " + ("mean ± 95 %" if varies else "which change nothing of this trace")
    table(title, columns, rows, right=range(1, len(columns)))
    is_paced = len({outcome.scenario.load.rate for outcome in outcomes}) == 1
    printed(f"{described(outcomes[0].load, with_pace=is_paced)}.")
    print_limits([outcome.scenario for outcome in outcomes], [outcome.load for outcome in outcomes])


def _replicas(result: SimulationResult) -> list[tuple[str, str]]:
    if result.replicas == 1:
        return []
    busiest = f"the busiest computes {result.imbalance:.2f} × the mean"
    return [("replicas", f"{result.replicas}, each with such a pool; router {result.router}; {busiest}")]


def summary(result: SimulationResult) -> list[tuple[str, str]]:
    """Return the figures of a simulation, as (name, value)."""
    computed = max(result.computed_tokens, 1)
    pool = f"{result.num_blocks:,} blocks of {result.block_size} tokens, {result.host_blocks:,} on the host"
    if result.groups:
        pool = f"{result.num_blocks:,} pages, blocks of {result.block_size} tokens; {'; '.join(result.groups)}"
    preemptions = f"{result.preemptions.recompute:,} by recompute, {result.preemptions.swap:,} by swap, at most {result.max_preemptions} of one request"
    lines = [
        ("requests", f"{result.requests:,}: {result.finished:,} finished, {result.rejected:,} rejected"),
        ("pool", pool),
        *_replicas(result),
        ("steps", f"{result.steps:,}, token budget {_budget(result)}"),
        (
            "virtual time",
            f"{result.makespan_s:,.1f} s, {result.busy_s / result.makespan_s if result.makespan_s else 0:.0%} of it busy",
        ),
        ("virtual throughput", f"{result.throughput:,.1f} output tokens/s, {result.requests_per_s:,.2f} requests/s"),
        ("time to first token", _percentiles(result.ttft_s)),
        ("between tokens", _percentiles(result.itl_s)),
        ("longest gap", _percentiles(result.longest_gap_s)),
        ("request, end to end", _percentiles(result.e2e_s)),
        (
            f"{'pages' if result.groups else 'blocks'} used",
            f"{result.peak_block_usage:.1%} at the peak, {result.mean_block_usage:.1%} on average",
        ),
        ("memory that holds tokens", _shares(result.memory)),
        ("while requests wait", _shares(result.memory_while_waiting)),
        (
            "occupancy",
            f"{result.row_occupancy:.1%} of {result.max_sequences:,} sequences"
            + ("" if result.token_occupancy is None else f", {result.token_occupancy:.1%} of the token budget"),
        ),
        (
            "prefix hits",
            f"{result.hit_tokens:,} of {result.prompt_tokens:,} prompt tokens, {result.prefix_hit_rate:.1%}",
        ),
        ("preemptions", preemptions),
        (
            "computed again",
            f"{result.wasted_tokens:,} of {result.computed_tokens:,} tokens, {result.wasted_tokens / computed:.1%}",
        ),
        ("swapped", f"{result.swapped_out_blocks:,} blocks out, {result.swapped_in_blocks:,} in"),
    ]
    if result.cost_per_million_tokens is not None:
        lines.append(("cost", f"{result.cost_per_million_tokens:,.2f} per million output tokens"))
    lines.append(("host time", f"{result.us_per_step:,.0f} µs a step; {result.wall_s:.1f} s in all"))
    if result.checked_steps:
        lines.append(("invariants", f"{result.violations:,} violations in {result.checked_steps:,} checked steps"))
        lines += [("violation", message) for message in result.violation_messages]
    return lines


def _title(result: SimulationResult) -> str:
    return f"{result.trace}, policy {result.policy}"


def _percentiles(seconds: Percentiles) -> str:
    if seconds.p50 is None or seconds.p90 is None or seconds.p99 is None:
        return "none"
    return f"p50 {as_time(seconds.p50)}, p90 {as_time(seconds.p90)}, p99 {as_time(seconds.p99)}"


def _budget(result: SimulationResult) -> str:
    return "none" if result.max_tokens_per_step is None else f"{result.max_tokens_per_step:,}"


def _shares(spread: Spread) -> str:
    return f"{spread.of_held:.1%} of what sequences hold, {spread.of_pool:.1%} of the pool"


def _mean(value: Callable[[SimulationResult], float | None], shown: Callable[[float], str]) -> Callable[..., str]:
    """Return a function that shows the mean of a figure over seeds, as far as it is known."""

    def cell(results: Sequence[SimulationResult]) -> str:
        known = [each for each in map(value, results) if each is not None]
        if not known:
            return "none"
        found = interval(known)
        # Without a half-width if all seeds give the same.
        return f"{shown(found.mean)} ± {shown(found.half_width)}" if found.half_width else shown(found.mean)

    return cell


def _varies(value: Callable[[Outcome], object]) -> Callable[[Sequence[Outcome]], bool]:
    return lambda outcomes: len({value(outcome) for outcome in outcomes}) > 1


_VARIED: tuple[tuple[str, Callable[[Sequence[Outcome]], bool], Callable[[Outcome], str]], ...] = (
    (
        "rate",
        _varies(lambda outcome: outcome.scenario.load.rate),
        lambda outcome: outcome.load.pace(outcome.scenario.load.rate),
    ),
    (
        "router",
        lambda outcomes: any(outcome.result.replicas > 1 for outcome in outcomes),
        lambda outcome: outcome.result.router or "",
    ),
    ("blocks", _varies(lambda outcome: outcome.result.num_blocks), lambda outcome: f"{outcome.result.num_blocks:,}"),
    (
        "budget",
        _varies(lambda outcome: outcome.result.max_tokens_per_step),
        lambda outcome: _budget(outcome.result),
    ),
)
"""Columns that are shown only if the simulations differ in them."""
_COMPARED: tuple[tuple[str, Callable[..., str]], ...] = (
    ("tokens/s", _mean(lambda result: result.throughput, "{:,.1f}".format)),
    ("p99 first", _mean(lambda result: result.ttft_s.p99, as_time)),
    ("p99 gap", _mean(lambda result: result.longest_gap_s.p99, as_time)),
    ("of held", _mean(lambda result: result.memory.of_held, "{:.1%}".format)),
    ("of pool", _mean(lambda result: result.memory.of_pool, "{:.1%}".format)),
    ("preempted", _mean(lambda result: result.preemptions.recompute + result.preemptions.swap, "{:,.0f}".format)),
    ("waste", _mean(lambda result: result.waste, "{:.2%}".format)),
    ("hits", _mean(lambda result: result.prefix_hit_rate, "{:.1%}".format)),
    ("finished", _mean(lambda result: result.finished, "{:,.0f}".format)),
    ("rejected", _mean(lambda result: result.rejected, "{:,.0f}".format)),
)


def described(load: TraceFacts, *, with_pace: bool = True) -> str:
    """Return a trace's requests, rate, lengths, what was left out, and what it is an excerpt of."""
    pace = ""
    if load.per_s and with_pace:
        pace = f" over {load.span_s:,.0f} s, {per_second(load.per_s)} requests/s"
    lengths = f"prompts {_lengths(load.prompts)}, outputs {_lengths(load.outputs)}"
    said = f"{load.name}: {load.requests:,} requests{pace}, {lengths}"
    if load.drawn_from is not None:
        said += f"; drawn from its {load.drawn_from:,} requests, which end before this load has settled (--least-span 0: as it is)"
    if load.context is not None and (load.left_out or load.clipped):
        became = f"{load.left_out:,} left out" if load.left_out else f"{load.clipped:,} clipped"
        said += f"; {became}, longer than the context of {load.context:,} tokens"
    return f"{said}; {load.note}" if load.note else said


def unsettled(load: TraceFacts) -> str:
    """Return that a trace is too short for its load, and what to do; "" if it is long enough."""
    if not load.is_too_short:
        return ""
    return (
        f"the trace lasts {load.span_s:,.3g} s, and a service under such a load has settled after about {load.settles_in_s:,.3g} s: the figures "
        f"are of one that fills up; --least-span {load.settles_in_s:g} draws the trace longer from itself"
    )


def print_limits(scenarios: Sequence[Scenario], loads: Sequence[TraceFacts]) -> None:
    """Print the limits of scenarios' traces and devices, each sentence once; of the traces that are too short, only the shortest."""
    shortest = min(loads, key=lambda load: load.span_s / load.settles_in_s if load.settles_in_s else math.inf)
    if note := unsettled(shortest):
        printed(f"Note: {note}.")
    for note in dict.fromkeys(note for scenario in scenarios for note in scenario.device.notes()):
        printed(f"Note: {note}.")
    for each in dict.fromkeys(each for scenario in scenarios for each in scenario.device.not_modelled()):
        printed(f"Not modelled: {each}.")


def over_budget(count: int, requests: int, policy: str, budget: int) -> str:
    """Return that `count` prompts are longer than the token budget of a policy that splits no prompt."""
    return (
        f"{policy} splits no prompt, and {count:,} of {requests:,} prompts are over its token budget of {budget:,}: each is computed "
        f"alone, over several steps, where the system itself would refuse it"
    )


def _lengths(tokens: Lengths) -> str:
    return f"{tokens.mean:,.0f} tokens on average (p99 {tokens.p99:,})"
