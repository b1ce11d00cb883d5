"""Plans for people and for programs: a page with the answer, what binds it and all tried values; and these as CSV."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from paged.base.extras import import_with_extra
from paged.errors import InvalidConfig
from paged.study.report.drawing import QUIET, Figure, axes, beside, figure, line, log_axis, panel_title
from paged.study.report.frame import as_json, paragraphs, plot_place, row, scrolled, table, write_page
from paged.study.report.table import write_rows
from paged.study.simulator import Plan, Probe

_VALUES = {"rate": "rate, times the trace's own", "memory": "blocks", "devices": "replicas"}
_NAMES = {"ttft_s": "time to first token", "gap_s": "longest gap of a request", "itl_s": "between two tokens"}
_LOOKS = ((True, "met", "#009E73", "circle"), (False, "missed", "#D55E00", "x"))


class PlanPage(msgspec.Struct, frozen=True):
    """A plan with its answer in words, or that nothing meets, and further lines."""

    plan: Plan
    answer: str
    lines: tuple[str, ...]


def write_plan_html(path: str | Path, pages: Sequence[PlanPage]) -> None:
    """Write a self-contained page of these plans, one under the other: answer, plot, table.

    Raises MissingExtra without plotly, InvalidConfig without plans, and UnwritablePath.
    """
    import_with_extra("plotly.offline", "study.report.write_plan_html")
    if not pages:
        raise InvalidConfig("a report needs at least one plan; there is none")
    traces = ", ".join(dict.fromkeys(page.plan.load.name for page in pages))
    plots = (as_json(plotted(page.plan)) for page in pages)
    write_page(path, f"Plan for {traces}", list(map(_section, pages)), plots, "plan.js")


def write_plan_csv(path: str | Path, plans: Sequence[Plan]) -> None:
    """Write a row for each tried value of each plan. Raises UnwritablePath."""
    write_rows(path, [_row(plan, probe) for plan in plans for probe in plan.probes])


def plotted(plan: Plan) -> Figure:
    """Plot each target's 99th percentile against the value, met and missed, with the target as a line, without trials that ended early."""
    targets = plan.targets.given()
    whole = [probe for probe in plan.probes if probe.p99 is not None]
    values = [probe.value for probe in plan.probes]
    data: list[Figure] = []
    layout: Figure = {}
    for i, ((name, limit), domain) in enumerate(zip(targets, beside(len(targets)))):
        for is_met, outcome, colour, symbol in _LOOKS:
            drawn = [probe for probe in whole if probe.met == is_met and _p99(probe, name)]
            data.append(
                line(
                    i,
                    [probe.value for probe in drawn],
                    [_p99(probe, name) for probe in drawn],
                    "markers",
                    name=outcome,
                    marker={"color": colour, "symbol": symbol, "size": 10},
                    hovertemplate=f"%{{x:,}}: %{{y:.3g}} s<extra>{outcome}</extra>",
                )
            )
        data.append(
            line(
                i,
                [min(values), max(values)],
                [limit, limit],
                name="target",
                line={"color": QUIET, "dash": "dash", "width": 1.5},
                hovertemplate="target %{y:.3g} s<extra></extra>",
            )
        )
        known = [limit, *(seconds for probe in whole if (seconds := _p99(probe, name)))]
        across = log_axis(f"{_axis(plan)} (logarithmic)", min(values), max(values), domain=domain)
        layout |= axes(i, across, log_axis("seconds (s, logarithmic)", min(known), max(known)))
    titles = [panel_title(f"p99 of {_NAMES[name]}", i) for i, (name, _) in enumerate(targets)]
    return figure(data, 360, annotations=titles, **layout)


def _p99(probe: Probe, name: str) -> float | None:
    return None if probe.p99 is None else getattr(probe.p99, name)


def _row(plan: Plan, probe: Probe) -> dict[str, Any]:
    scenario = plan.scenario
    return {
        "find": plan.find,
        "trace": plan.load.name,
        "policy": scenario.policy_rules().name,
        "model": scenario.device.model,
        "device": scenario.device.device,
        "max_tokens_per_step": scenario.budget(),
        "value": probe.value,
        "met": probe.met,
        "is_answer": probe.value == plan.answer,
        **{f"{name}_target": getattr(plan.targets, name) for name in _NAMES},
        **{f"{name[:-2]}_p99_s": _p99(probe, name) for name in _NAMES},
        "misses": "; ".join(miss.promise for miss in probe.misses),
        "simulations": probe.simulations,
        "steps": probe.steps,
    }


def _axis(plan: Plan) -> str:
    return "pages" if plan.find == "memory" and plan.groups else _VALUES[plan.find]


def _section(page: PlanPage) -> str:
    plan, scenario = page.plan, page.plan.scenario
    what = " · ".join(filter(None, (scenario.policy_rules().name, scenario.device.model, scenario.device.device)))
    head = [_axis(plan), *(f"p99 of {name} (s)" for name in _NAMES.values()), "outcome"]
    shown = table(head, (_table_row(plan, probe) for probe in plan.probes))
    return (
        f"<section><h2>{escape(what)}</h2><p><strong>{escape(page.answer)}</strong></p>{paragraphs(page.lines)}"
        f"{plot_place('p99 of each target against the value')}{scrolled(shown)}</section>"
    )


def _table_row(plan: Plan, probe: Probe) -> str:
    seconds = [_p99(probe, name) for name in _NAMES]
    missed = (_NAMES.get(miss.promise, miss.promise.replace("_", " ")) for miss in probe.misses)
    outcome = "met" if probe.met else "missed: " + ", ".join(missed)
    value = f"{probe.value:,}" if isinstance(probe.value, int) else f"{probe.value:g}"
    cells = [*("–" if each is None else f"{each:.3f}" for each in seconds), outcome]
    return row(value, [(text, probe.value == plan.answer) for text in cells])
