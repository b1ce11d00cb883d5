"""The common parts of all plots: paper, axes, panels beside and above one another.

A plot is a dict in plotly's schema (https://plotly.com/javascript/reference/) with numpy arrays, so it is made without plotly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Figure = dict[str, Any]

INK, QUIET, GRID = "#24292f", "#57606a", "#e6e8eb"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def axis(title: str, **more: Any) -> Figure:
    """Return an axis; `title` ends with the unit."""
    return {
        "title": {"text": title, "font": {"size": 13, "color": QUIET}, "standoff": 8},
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": "#b6bcc2",
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#b6bcc2",
        "exponentformat": "none",
        "separatethousands": True,
        "automargin": True,
    } | more


def count_axis(title: str, high: float, **more: Any) -> Figure:
    """Return an axis of whole numbers up to `high`, each labelled once."""
    return axis(title, **({"tickformat": ",d"} | ({"dtick": 1} if high < 6 else {}) | more))


def log_axis(title: str, low: float, high: float, **more: Any) -> Figure:
    """Return a logarithmic axis from `low` to `high`, both above 0, or both 0 without data; `title` says that it is logarithmic.

    Its labels are powers of ten; over less than 2.5 decades 2 and 5, too; over less than 0.8 plotly's choice.
    """
    if high <= 0:
        return axis(title, type="log", **more)
    span = np.log10(high / low)
    margin = max(0.04 * span, 0.05)
    ticks: Figure = {} if span < 0.8 else {"dtick": "D2"} if span < 2.5 else {"dtick": 1}
    bounds = [float(np.log10(low) - margin), float(np.log10(high) + margin)]
    return axis(title, type="log", range=bounds, minorloglabels="complete", **(ticks | more))


def extent(data: Sequence[Figure], coordinate: str, axis: str | None = None) -> tuple[float, float]:
    """Return the smallest and largest value above 0 of these traces' x or y, on one axis or on all (None); 0 and 0 without any."""
    values = [trace[coordinate] for trace in data if axis is None or trace[f"{coordinate}axis"] == axis]
    known = np.concatenate([np.asarray(value, np.float64) for value in values] or [np.empty(0)])
    known = known[known > 0]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)


def figure(data: Sequence[Figure], height: int, **layout: Any) -> Figure:
    """Return a figure of these traces, `height` in pixels, as wide as the page."""
    return {
        "data": list(data),
        "layout": {
            "template": {},
            "height": height,
            "autosize": True,
            "showlegend": False,
            "margin": {"l": 64, "r": 24, "t": 28, "b": 52},
            "paper_bgcolor": "#fff",
            "plot_bgcolor": "#fff",
            "font": {"family": _FONT, "size": 13, "color": INK},
            "hoverlabel": {"font": {"family": _FONT, "size": 13}},
        }
        | layout,
    }


def line(panel: int, x: Any, y: Any, mode: str = "lines", **more: Any) -> Figure:
    """Return joined or marked points in a panel."""
    return {"type": "scatter", "mode": mode, "x": x, "y": y} | on(panel) | more


def on(panel: int) -> Figure:
    """Return the axes of a trace in a panel."""
    return {"xaxis": numbered("x", panel), "yaxis": numbered("y", panel)}


def axes(panel: int, across: Figure, up: Figure) -> Figure:
    """Return the two axes of a panel for a layout, anchored at each other."""
    return {
        numbered("xaxis", panel): across | {"anchor": numbered("y", panel)},
        numbered("yaxis", panel): up | {"anchor": numbered("x", panel)},
    }


def beside(count: int, gap: float = 0.08) -> list[tuple[float, float]]:
    """Return horizontal domains of so many panels, from the left; reversed, they are vertical ones from the top."""
    width = (1 - gap * (count - 1)) / count
    return [(i * (width + gap), min(1.0, i * (width + gap) + width)) for i in range(count)]


def numbered(name: str, i: int) -> str:
    """Return plotly's name of the i-th axis, from 0: x, x2, x3; for `xaxis`: xaxis, xaxis2."""
    return name if i == 0 else f"{name}{i + 1}"


def panel_title(text: str, i: int) -> Figure:
    """Return a heading at the upper left of panel i."""
    return {
        "text": text,
        "x": 0,
        "y": 1,
        "xref": f"{numbered('x', i)} domain",
        "yref": f"{numbered('y', i)} domain",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 4,
        "showarrow": False,
        "font": {"size": 13, "color": INK},
    }
