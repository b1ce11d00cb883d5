"""What all plots share: paper, axes, panels beside and above one another.

A plot is a plain dict in plotly's schema (https://plotly.com/javascript/reference/) with numpy arrays in it, so that making one needs no plotly.
Knows looks. Does not know outcomes.
"""

from collections.abc import Sequence
from typing import Any

Figure = dict[str, Any]

INK, QUIET, GRID = "#24292f", "#57606a", "#e6e8eb"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def axis(title: str, **more: Any) -> Figure:
    """An axis; `title` ends with the unit."""
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


def log_axis(title: str, **more: Any) -> Figure:
    """A logarithmic axis; `title` says so."""
    return axis(title, type="log", **more)


def figure(data: Sequence[Figure], height: int, **layout: Any) -> Figure:
    """Traces on paper, `height` in pixels, as wide as the page."""
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


def beside(count: int, gap: float = 0.08) -> list[tuple[float, float]]:
    """Horizontal domains of so many panels, from the left."""
    width = (1 - gap * (count - 1)) / count
    return [(i * (width + gap), min(1.0, i * (width + gap) + width)) for i in range(count)]


def stacked(count: int, gap: float = 0.07) -> list[tuple[float, float]]:
    """Vertical domains of so many panels, from the top."""
    return beside(count, gap)[::-1]


def numbered(name: str, i: int) -> str:
    """Plotly's name of the i-th axis, from 0: x, x2, x3; with `xaxis`: xaxis, xaxis2."""
    return name if i == 0 else f"{name}{i + 1}"


def panel_title(text: str, i: int) -> Figure:
    """A heading at the upper left of panel i."""
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
