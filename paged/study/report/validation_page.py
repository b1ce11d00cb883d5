"""A page with a recorded run beside its simulation: figures and errors, and running and waiting requests and KV in use over time."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from paged.base.extras import import_with_extra
from paged.study.report.drawing import Figure, axes, axis, beside, figure, line, on, panel_title
from paged.study.report.frame import as_json, paragraphs, plot_place, row, scrolled, table, write_page
from paged.study.simulator import METRICS, STATISTICS, Validation

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
    for i, (metric, domain) in enumerate(zip(METRICS, _domains(len(METRICS)))):
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


def _domains(count: int) -> list[tuple[float, float]]:
    """Return horizontal domains; the first, of one pair of bars, is narrow."""
    narrow, gap = 0.1, 0.07
    width = (1 - narrow - gap * (count - 1)) / (count - 1)
    starts = [narrow + gap + i * (width + gap) for i in range(count - 1)]
    return [(0.0, narrow), *((start, start + width) for start in starts)]


def validation_rows(found: Validation) -> Sequence[tuple[str, str, str, str]]:
    """Return lines of name, measured, simulated and error."""
    return [*_latency_rows(found), *_series_rows(found)]


def _latency_rows(found: Validation) -> Iterator[tuple[str, str, str, str]]:
    for metric in METRICS:
        scale, unit = _unit(metric)
        for statistic in _statistics(metric):
            name = metric if metric == "makespan" else f"{_WORDS[metric]}, {statistic}"
            measured, simulated = (
                f"{scale * getattr(of[metric], statistic):,.{1 if unit == 'ms' else 2}f} {unit}"
                for of in (found.measured, found.simulated)
            )
            yield name, measured, simulated, f"{found.errors[metric][statistic]:+.1%}"


def _series_rows(found: Validation) -> Iterator[tuple[str, str, str, str]]:
    error = found.series_error
    if error is None:
        return
    yield (
        "sequences that run, over time",
        "",
        "",
        f"{error.running_mean:+.1%} on average, {error.running:.1%} apart",
    )
    if error.kv_points is not None and error.kv_points_mean is not None:
        apart = f"{error.kv_points_mean:+.1f} points on average, {error.kv_points:.1f} apart"
        yield "KV in use, over time", "", "", apart


def _statistics(metric: str) -> tuple[str, ...]:
    """Return a metric's statistics; a makespan has one."""
    return STATISTICS[:1] if metric == "makespan" else STATISTICS


def _unit(metric: str) -> tuple[float, str]:
    """Return the factor on seconds and the unit of a metric."""
    return (1e3, "ms") if metric == "tpot" else (1.0, "s")
