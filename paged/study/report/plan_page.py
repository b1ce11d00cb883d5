"""A plan for people and for other programs: a page with the answer, what binds it and all that was tried; and the tries as CSV."""

import csv
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paged.base.extras import import_with_extra
from paged.base.whole_file import whole_file
from paged.errors import InvalidConfig
from paged.study.report.drawing import QUIET, Figure, beside, figure, log_axis, numbered, panel_title
from paged.study.report.frame import as_json, framed
from paged.study.simulator import Plan, Probe

_VALUES = {"rate": "rate, times the trace's own", "memory": "blocks", "devices": "replicas"}
_NAMES = {"ttft_s": "time to first token", "gap_s": "longest gap of a request", "itl_s": "between two tokens"}
_LOOKS = ((True, "met", "#009E73", "circle"), (False, "missed", "#D55E00", "x"))


class PlanPage(msgspec.Struct, frozen=True):
    """A plan and what is said of it: the answer, or that nothing meets; and a sentence a line beside it."""

    plan: Plan
    answer: str
    lines: tuple[str, ...]


def write_plan_html(path: str | Path, pages: Sequence[PlanPage]) -> None:
    """A self-contained page of these plans, one under the other: answer, plot, table.

    Raises MissingExtra without plotly, InvalidConfig without plans, and OSError.
    """
    import_with_extra("plotly.offline", "study.report.write_plan_html")
    if not pages:
        raise InvalidConfig("a report needs at least one plan; there is none")
    plans = [page.plan for page in pages]
    traces = ", ".join(dict.fromkeys(plan.load.name for plan in plans))
    text = framed(
        f"Plan for {traces}",
        [_section(page) for page in pages],
        f"[{','.join(as_json(plotted(plan)) for plan in plans)}]",
        "plan.js",
    )
    with whole_file(path) as file:
        file.write(text)


def write_plan_csv(path: str | Path, plans: Sequence[Plan]) -> None:
    """A header, and a row for each value that was tried, of each plan. What does not exist is an empty cell. Raises UnwritablePath."""
    rows = [_row(plan, probe) for plan in plans for probe in plan.probes]
    with whole_file(path, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plotted(plan: Plan) -> Figure:
    """Each target's 99th percentile against the value, met and missed, with the target as a line; who was given up early has none."""
    targets = plan.targets.given()
    whole = [probe for probe in plan.probes if probe.p99 is not None]
    values = [probe.value for probe in plan.probes]
    data: list[Figure] = []
    axes: dict[str, Any] = {}
    for i, ((name, limit), domain) in enumerate(zip(targets, beside(len(targets)))):
        on = {"xaxis": numbered("x", i), "yaxis": numbered("y", i)}
        for is_met, outcome, colour, symbol in _LOOKS:
            drawn = [probe for probe in whole if probe.met == is_met and _p99(probe, name)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": outcome,
                    "x": [probe.value for probe in drawn],
                    "y": [_p99(probe, name) for probe in drawn],
                    "marker": {"color": colour, "symbol": symbol, "size": 10},
                    "hovertemplate": f"%{{x:,}}: %{{y:.3g}} s<extra>{outcome}</extra>",
                    **on,
                }
            )
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "target",
                "x": [min(values), max(values)],
                "y": [limit, limit],
                "line": {"color": QUIET, "dash": "dash", "width": 1.5},
                "hovertemplate": "target %{y:.3g} s<extra></extra>",
                **on,
            }
        )
        known = [limit, *(seconds for probe in whole if (seconds := _p99(probe, name)))]
        axes[numbered("xaxis", i)] = log_axis(
            f"{_axis(plan)} (logarithmic)", min(values), max(values), domain=domain, anchor=numbered("y", i)
        )
        axes[numbered("yaxis", i)] = log_axis(
            "seconds (s, logarithmic)", min(known), max(known), anchor=numbered("x", i)
        )
    titles = [panel_title(f"p99 of {_NAMES[name]}", i) for i, (name, _) in enumerate(targets)]
    return figure(data, 360, annotations=titles, **axes)


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
    plan = page.plan
    heads = [_axis(plan), *(f"p99 of {name} (s)" for name in _NAMES.values()), "outcome"]
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    rows = "".join(_table_row(plan, probe) for probe in plan.probes)
    scenario = plan.scenario
    what = " · ".join(filter(None, (scenario.policy_rules().name, scenario.device.model, scenario.device.device)))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in page.lines)
    return (
        f"<section><h2>{html.escape(what)}</h2><p><strong>{html.escape(page.answer)}</strong></p>{lines}"
        f'<div class="plot" role="img" aria-label="p99 of each target against the value"></div>'
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _table_row(plan: Plan, probe: Probe) -> str:
    cells = []
    for name in _NAMES:
        seconds = _p99(probe, name)
        cells.append("–" if seconds is None else f"{seconds:.3f}")
    outcome = "met" if probe.met else "missed: " + ", ".join(_promise(miss.promise) for miss in probe.misses)
    opening = '<td class="best">' if probe.value == plan.answer else "<td>"
    value = f"{probe.value:,}" if isinstance(probe.value, int) else f"{probe.value:g}"
    shown = "".join(f"{opening}{html.escape(text)}</td>" for text in [*cells, outcome])
    return f'<tr><th scope="row">{value}</th>{shown}</tr>'


def _promise(promise: str) -> str:
    return _NAMES.get(promise, promise.replace("_", " "))
