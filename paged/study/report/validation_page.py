"""A page with a recorded run beside its simulation: figures and errors, and running and waiting requests and KV in use over time. And a page on sessions
by the rule that keeps content: hits by tier, and times to first token.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paged.base.extras import import_with_extra
from paged.study.report.drawing import QUIET, Figure, axes, axis, beside, figure, line, on, panel_title
from paged.study.report.frame import as_json, paragraphs, plot_place, row, scrolled, table, write_page
from paged.study.simulator import METRICS, STATISTICS, TURN_GROUPS, SessionResult, Validation

_LOOKS = (("measured", "#57606a"), ("simulated", "#0072B2"))
_PANELS = {"running": "sequences that run", "waiting": "requests that wait", "kv_usage": "share of KV in use"}
_WORDS = {"makespan": "makespan", "ttft": "time to first token", "tpot": "time a token after it", "e2e": "end to end"}
_LEGEND = {"orientation": "h", "x": 1, "xanchor": "right", "y": -0.12, "yanchor": "top"}


def write_validation_html(path: str | Path, found: Validation) -> None:
    """Write a self-contained page. Raises MissingExtra without plotly, and UnwritablePath."""
    import_with_extra("plotly.offline", "study.report.write_validation_html")
    plots = [latencies(found), *([over_time(found)] if found.series else [])]
    rows = (row(escape(name), [(cell, False) for cell in cells]) for name, *cells in validation_rows(found))
    shown = table(("", "measured", "simulated", "error"), rows, '<table style="max-width: 700px">')
    body = [
        paragraphs([f"Engine {found.engine}; {found.cost_model}.", *found.assumed]),
        scrolled(shown),
        *[f"<section>{plot_place('measured and simulated')}</section>"] * len(plots),
    ]
    write_page(path, f"{found.run}: measured and simulated", body, map(as_json, plots), "plan.js")


def latencies(found: Validation) -> Figure:
    """Plot each metric's statistics, measured and simulated side by side."""
    data: list[Figure] = []
    layout: Figure = {}
    for i, (metric, domain) in enumerate(zip(METRICS, beside(len(METRICS), 0.07))):
        scale, unit = _unit(metric)
        names = _statistics(metric)
        for (name, colour), of in zip(_LOOKS, (found.measured, found.simulated)):
            bar = {
                "type": "bar",
                "name": name,
                "showlegend": i == 0,
                "marker": {"color": colour},
                "x": list(names) if len(names) > 1 else [""],
                "y": [scale * getattr(of[metric], statistic) for statistic in names],
            }
            data.append(bar | on(i))
        layout |= axes(i, axis("", domain=domain), axis(unit, rangemode="tozero"))
    titles = [panel_title(_WORDS[metric], i) for i, metric in enumerate(METRICS)]
    return figure(data, 320, annotations=titles, showlegend=True, barmode="group", legend=_LEGEND, **layout)


def over_time(found: Validation) -> Figure:
    """Plot the engine's log and the simulation at the same moments, one panel above the other."""
    panels = [name for name in _PANELS if f"{name}_measured" in found.series]
    data: list[Figure] = []
    layout: Figure = {}
    for i, (name, domain) in enumerate(zip(panels, reversed(beside(len(panels), 0.1)))):
        for (look, colour), width in zip(_LOOKS, (3, 2)):
            drawn = {"color": colour, "width": width, "dash": "solid"}
            data.append(
                line(i, found.series["t"], found.series[f"{name}_{look}"], name=look, showlegend=i == 0, line=drawn)
            )
        unit = "s" if name == panels[-1] else ""
        layout |= axes(i, axis(unit, domain=[0, 1]), axis("", domain=domain, rangemode="tozero"))
    titles = [panel_title(_PANELS[name], i) for i, name in enumerate(panels)]
    return figure(data, 220 * len(panels) + 40, annotations=titles, showlegend=True, legend=_LEGEND, **layout)


def validation_rows(found: Validation) -> Sequence[tuple[str, str, str, str]]:
    """Return lines of name, measured, simulated and error."""
    rows = []
    for metric in METRICS:
        scale, unit = _unit(metric)
        for statistic in _statistics(metric):
            name = metric if metric == "makespan" else f"{_WORDS[metric]}, {statistic}"
            measured, simulated = (
                f"{scale * getattr(of[metric], statistic):,.{1 if unit == 'ms' else 2}f} {unit}"
                for of in (found.measured, found.simulated)
            )
            rows.append((name, measured, simulated, f"{found.errors[metric][statistic]:+.1%}"))
    if (error := found.series_error) is not None:
        apart = f"{error.running_mean:+.1%} on average, {error.running:.1%} apart"
        rows.append(("sequences that run, over time", "", "", apart))
        if error.kv_points is not None:
            apart = f"{error.kv_points_mean:+.1f} points on average, {error.kv_points:.1f} apart"
            rows.append(("KV in use, over time", "", "", apart))
    return rows


def _statistics(metric: str) -> tuple[str, ...]:
    """Return a metric's statistics; a makespan has one."""
    return STATISTICS[:1] if metric == "makespan" else STATISTICS


def _unit(metric: str) -> tuple[float, str]:
    """Return the factor on seconds and the unit of a metric."""
    return (1e3, "ms") if metric == "tpot" else (1.0, "s")


_TIERS = (("device", "#0072B2"), ("host", "#E69F00"), ("disk", "#009E73"))
_COLOURS = {"lru": "#57606a", "sessions": "#E69F00", "hints": "#0072B2"}


def write_sessions_html(path: str | Path, found: Sequence[SessionResult]) -> None:
    """Write a self-contained page of at least one result. Raises MissingExtra without plotly, and UnwritablePath."""
    import_with_extra("plotly.offline", "study.report.write_sessions_html")
    first = found[0]
    about = (
        f"Sessions: {first.sessions:,}; turns: {first.turns:,}; full blocks in their prompts: {first.prompt_blocks:,}."
    )
    body = [paragraphs([about]), f"<section>{plot_place('hits by tier, and times to first token')}</section>"]
    write_page(path, "Sessions: what is kept between turns", body, [as_json(plot_of(found))], "plan.js")


def plot_of(found: Sequence[SessionResult]) -> Figure:
    """Plot the shares of the prompts' blocks that hit, by tier, and the 90th percentile of times to first token, by turn."""
    names = [each.keeps for each in found]
    data: list[Figure] = [
        {
            "type": "bar",
            "name": tier,
            "marker": {"color": colour},
            "x": names,
            "y": [getattr(each, tier) for each in found],
        }
        | on(0)
        for tier, colour in _TIERS
    ]
    for name, dash in (("kept", "dot"), ("offline", "dash")):
        shares = [getattr(each, name) for each in found]
        data.append(line(0, names, shares, "lines+markers", name=name, line={"color": QUIET, "dash": dash}))
    left, right = beside(2, 0.12)
    across = axis("what says what is kept", type="category", domain=left)
    layout = axes(0, across, axis("share of the prompts' blocks", range=[0, 1]))
    titles = [panel_title("what hit where", 0)]
    # Bounds have no times.
    timed = [each for each in found if each.ttft_s.p90]
    turns = [f"{a:g}" if a == b else f"{a:g}–{b:g}" if b < math.inf else f"{a:g}–" for a, b in TURN_GROUPS]
    for each in timed:
        seconds, colour = [group.p90 for group in each.ttft_by_turn], {"color": _COLOURS[each.keeps]}
        data.append(line(1, turns, seconds, "lines+markers", name=f"TTFT, {each.keeps}", line=colour))
    if timed:
        layout |= axes(1, axis("turn", type="category", domain=right), axis("s", rangemode="tozero"))
        titles.append(panel_title("time to first token, p90", 1))
    legend = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "traceorder": "normal"}
    return figure(data, 420, annotations=titles, barmode="stack", showlegend=True, legend=legend, **layout)
