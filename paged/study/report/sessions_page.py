"""Sessions by what says what is kept, as a page: what hit where, and times to first token."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

from paged.base.extras import import_with_extra
from paged.base.whole_file import whole_file
from paged.study.report.drawing import QUIET, Figure, axis, beside, figure, numbered, panel_title
from paged.study.report.frame import as_json, framed
from paged.study.simulator import TURN_GROUPS, SessionResult

_TIERS = (("device", "#0072B2"), ("host", "#E69F00"), ("disk", "#009E73"))
_COLOURS = {"lru": "#57606a", "sessions": "#E69F00", "hints": "#0072B2"}


def write_sessions_html(path: str | Path, found: Sequence[SessionResult]) -> None:
    """A self-contained page. Raises MissingExtra without plotly, UnwritablePath and OSError."""
    import_with_extra("plotly.offline", "study.report.write_sessions_html")
    first = found[0]
    about = (
        f"Sessions: {first.sessions:,}; turns: {first.turns:,}; full blocks in their prompts: {first.prompt_blocks:,}."
    )
    body = [
        f"<p>{html.escape(about)}</p>",
        '<section><div class="plot" role="img" aria-label="hits by tier, and times to first token"></div></section>',
    ]
    text = framed("Sessions: what is kept between turns", body, f"[{as_json(plot_of(found))}]", "plan.js")
    with whole_file(path) as file:
        file.write(text)


def plot_of(found: Sequence[SessionResult]) -> Figure:
    """Shares of the prompts' blocks that hit, by tier; beside it the 90th percentile of times to first token, by turn."""
    data: list[Figure] = [
        {
            "type": "bar",
            "name": tier,
            "marker": {"color": colour},
            "x": [each.keeps for each in found],
            "y": [getattr(each, tier) for each in found],
            "xaxis": "x",
            "yaxis": "y",
        }
        for tier, colour in _TIERS
    ]
    for name, dash in (("kept", "dot"), ("offline", "dash")):
        values = [getattr(each, name) for each in found]
        line = {"color": QUIET, "dash": dash}
        names = [each.keeps for each in found]
        data.append({"type": "scatter", "mode": "lines+markers", "name": name, "line": line, "x": names, "y": values})
    # Within the bounds nothing takes any time.
    timed = [each for each in found if each.ttft_s.p90]
    for each in timed:
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"TTFT, {each.keeps}",
                "line": {"color": _COLOURS[each.keeps]},
                "x": [f"{a:g}" if a == b else f"{a:g}–{b:g}" if b < math.inf else f"{a:g}–" for a, b in TURN_GROUPS],
                "y": [group.p90 for group in each.ttft_by_turn],
                "xaxis": "x2",
                "yaxis": "y2",
            }
        )
    axes: Figure = {}
    panels = ("what says what is kept", "turn")[: 1 + bool(timed)]
    for i, (title, domain) in enumerate(zip(panels, beside(2, 0.12), strict=False)):
        axes[numbered("xaxis", i)] = axis(title, type="category", domain=list(domain), anchor=numbered("y", i))
    axes["yaxis"] = axis("share of the prompts' blocks", anchor="x", range=[0, 1])
    titles = [panel_title("what hit where", 0)]
    if timed:
        axes["yaxis2"] = axis("s", anchor="x2", rangemode="tozero")
        titles.append(panel_title("time to first token, p90", 1))
    legend = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "traceorder": "normal"}
    return figure(data, 420, annotations=titles, barmode="stack", showlegend=True, legend=legend, **axes)
