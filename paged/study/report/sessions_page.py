"""A page on sessions by the rule that keeps content: hits by tier, and times to first token."""

import math
from collections.abc import Sequence
from pathlib import Path

from paged.base.extras import import_with_extra
from paged.study.report.drawing import QUIET, Figure, axes, axis, beside, figure, line, on, panel_title
from paged.study.report.frame import as_json, paragraphs, plot_place, write_page
from paged.study.simulator import TURN_GROUPS, SessionResult

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
