"""A recorded run beside its simulation, as a page: figures and errors, and what ran, waited and was held over time."""

import html
from collections.abc import Sequence
from pathlib import Path

from paged.base.extras import import_with_extra
from paged.base.whole_file import whole_file
from paged.study.report.drawing import Figure, axis, figure, numbered, panel_title, stacked
from paged.study.report.frame import as_json, framed
from paged.study.simulator import METRICS, STATISTICS, Validation

_LOOKS = (("measured", "#57606a", "solid"), ("simulated", "#0072B2", "solid"))
_PANELS = {"running": "sequences that run", "waiting": "requests that wait", "kv_usage": "share of KV in use"}
_MILLI = {"tpot"}


def write_validation_html(path: str | Path, found: Validation) -> None:
    """A self-contained page. Raises MissingExtra without plotly, UnwritablePath and OSError."""
    import_with_extra("plotly.offline", "study.report.write_validation_html")
    plots = [latencies(found), *([over_time(found)] if found.series else [])]
    notes = [f"Engine {found.engine}; {found.cost_model}.", *found.assumed]
    body = [
        "".join(f"<p>{html.escape(note)}</p>" for note in notes),
        _table(found),
        *('<section><div class="plot" role="img" aria-label="measured and simulated"></div></section>' for _ in plots),
    ]
    text = framed(f"{found.run}: measured and simulated", body, f"[{','.join(map(as_json, plots))}]", "plan.js")
    with whole_file(path) as file:
        file.write(text)


def latencies(found: Validation) -> Figure:
    """Each metric's statistics, measured and simulated side by side."""
    data: list[Figure] = []
    axes: Figure = {}
    domains = _beside(len(METRICS))
    for i, metric in enumerate(METRICS):
        scale, unit = (1e3, "ms") if metric in _MILLI else (1.0, "s")
        names = STATISTICS[:1] if metric == "makespan" else STATISTICS
        for (name, colour, _), of in zip(_LOOKS, (found.measured, found.simulated)):
            data.append(
                {
                    "type": "bar",
                    "name": name,
                    "showlegend": i == 0,
                    "marker": {"color": colour},
                    "x": list(names) if metric != "makespan" else [""],
                    "y": [scale * getattr(of[metric], statistic) for statistic in names],
                    "xaxis": numbered("x", i),
                    "yaxis": numbered("y", i),
                }
            )
        axes[numbered("xaxis", i)] = axis("", domain=list(domains[i]), anchor=numbered("y", i))
        axes[numbered("yaxis", i)] = axis(unit, anchor=numbered("x", i), rangemode="tozero")
    titles = [panel_title(_words(metric), i) for i, metric in enumerate(METRICS)]
    return figure(data, 320, annotations=titles, showlegend=True, barmode="group", **_legend(), **axes)


def over_time(found: Validation) -> Figure:
    """What the engine logged, and the simulation at the same moments, one panel above the other."""
    panels = [name for name in _PANELS if f"{name}_measured" in found.series]
    data: list[Figure] = []
    axes: Figure = {}
    domains = stacked(len(panels), 0.1)
    for i, name in enumerate(panels):
        for look, colour, dash in _LOOKS:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": look,
                    "showlegend": i == 0,
                    "line": {"color": colour, "width": 2 if look == "simulated" else 3, "dash": dash},
                    "x": found.series["t"],
                    "y": found.series[f"{name}_{look}"],
                    "xaxis": numbered("x", i),
                    "yaxis": numbered("y", i),
                }
            )
        is_last = i == len(panels) - 1
        axes[numbered("xaxis", i)] = axis("s" if is_last else "", anchor=numbered("y", i), domain=[0, 1])
        axes[numbered("yaxis", i)] = axis("", domain=list(domains[i]), anchor=numbered("x", i), rangemode="tozero")
    titles = [panel_title(_PANELS[name], i) for i, name in enumerate(panels)]
    return figure(data, 220 * len(panels) + 40, annotations=titles, showlegend=True, **_legend(), **axes)


def _beside(count: int) -> list[tuple[float, float]]:
    """Horizontal domains; the first, of one pair of bars, is narrow."""
    narrow, gap = 0.1, 0.07
    width = (1 - narrow - gap * (count - 1)) / (count - 1)
    starts = [0.0, *(narrow + gap + i * (width + gap) for i in range(count - 1))]
    return [(start, start + (narrow if i == 0 else width)) for i, start in enumerate(starts)]


def _legend() -> Figure:
    return {"legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": -0.12, "yanchor": "top"}}


def _words(metric: str) -> str:
    return {"ttft": "time to first token", "tpot": "time a token after it", "e2e": "end to end"}.get(metric, metric)


def _table(found: Validation) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "measured", "simulated", "error"))
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in validation_rows(found)
    )
    return f'<div class="scroll" tabindex="0"><table style="max-width: 700px"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def validation_rows(found: Validation) -> Sequence[tuple[str, str, str, str]]:
    """Name, measured, simulated, error: a line each."""
    rows = []
    for metric in METRICS:
        for statistic in STATISTICS[:1] if metric == "makespan" else STATISTICS:
            name = metric if metric == "makespan" else f"{_words(metric)}, {statistic}"
            values = (getattr(found.measured[metric], statistic), getattr(found.simulated[metric], statistic))
            shown = [f"{1e3 * value:,.1f} ms" if metric in _MILLI else f"{value:,.2f} s" for value in values]
            rows.append((name, shown[0], shown[1], f"{found.errors[metric][statistic]:+.1%}"))
    if found.series_error is not None:
        error = found.series_error
        rows.append(
            (
                "sequences that run, over time",
                "",
                "",
                f"{error.running_mean:+.1%} on average, {error.running:.1%} apart",
            )
        )
        if error.kv_points is not None and error.kv_points_mean is not None:
            rows.append(
                (
                    "KV in use, over time",
                    "",
                    "",
                    f"{error.kv_points_mean:+.1f} points on average, {error.kv_points:.1f} apart",
                )
            )
    return rows
