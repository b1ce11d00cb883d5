"""Plots over virtual time: how KV memory is split, how full the system is, who queues.

Long ones are averaged over equal intervals (`averages.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.report.averages import Floats, averaged, edges_of
from paged.study.report.drawing import Figure, axis, figure, numbered, panel_title, stacked
from paged.study.report.naming import Named
from paged.study.simulator import Outcome

_TIME = "virtual time (s)"

NUM_POINTS = 2000
NUM_LINE_POINTS = 400
"""Where several outcomes lie over one another, fewer: their lines would fill the paper."""

# Dark to light, so that the split can be read without colours.
PARTS = {
    "tokens": "#3d5a75",
    "fragmentation": "#c8553d",
    "promised": "#e3b23c",
    "cached": "#b9cddb",
    "free": "#eaedf0",
}
"""What KV memory consists of, from the bottom, with its colour."""


def memory_parts(outcome: Outcome, edges: Floats) -> dict[str, Floats]:
    """KV slots by part, averaged between `edges`; together they are the pool.

    Entries have cached blocks at their end and the rest on average, and what policies promise may lie on cached blocks: cached slots are shown
    as far as neither held nor promised.
    """
    columns, result = outcome.timeline, outcome.result
    end_s, seconds = columns["end_s"], columns["seconds"]
    slots = float(result.num_blocks * result.block_size)
    held, filled, promised = (averaged(edges, end_s, seconds, columns[name]) for name in ("held", "filled", "promised"))
    promised = np.minimum(promised, slots - held)
    cached = np.minimum(averaged(edges, end_s, seconds, columns["cached"], keeps=True), slots - held - promised)
    return {
        "tokens": filled,
        "fragmentation": held - filled,
        "promised": promised,
        "cached": cached,
        "free": slots - held - promised - cached,
    }


def memory(named: Named) -> Figure:
    """One outcome's pool over time, split into parts."""
    result = named.outcome.result
    edges = edges_of(named.outcome.timeline["end_s"], named.outcome.timeline["seconds"], NUM_POINTS)
    slots = result.num_blocks * result.block_size
    data = [
        {
            "type": "scatter",
            "name": part,
            "x": _narrow(edges),
            "y": _narrow(_until_the_end(values)),
            "stackgroup": "pool",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0},
            "fillcolor": PARTS[part],
            "hovertemplate": "%{y:,.0f} slots<extra>" + part + "</extra>",
        }
        for part, values in memory_parts(named.outcome, edges).items()
    ]
    # The legend is read from the top, as the parts lie.
    legend = {"traceorder": "reversed", "x": 1.01, "y": 0.92, "xanchor": "left", "itemclick": False}
    return figure(
        data,
        380,
        showlegend=True,
        legend=legend,
        hovermode="x unified",
        margin={"l": 72, "r": 160, "t": 16, "b": 52},
        xaxis=axis(_TIME, range=[float(edges[0]), float(edges[-1])]),
        yaxis=axis("KV slots (tokens)", range=[0, slots], tickformat=",d"),
    )


def occupancy(outcomes: Sequence[Named]) -> Figure:
    """Shares of what a step could have: blocks, rows, tokens."""

    def held(outcome: Outcome) -> Floats:
        return 100 * outcome.timeline["held"] / (outcome.result.num_blocks * outcome.result.block_size)

    def rows(outcome: Outcome) -> Floats:
        return 100 * outcome.timeline["rows"] / outcome.result.max_sequences

    def tokens(outcome: Outcome) -> Floats:
        computed = outcome.timeline["tokens"] / outcome.timeline["steps"]
        budget = outcome.result.max_tokens_per_step
        return np.full(len(computed), np.nan) if budget is None else 100 * computed / budget

    panels: list[tuple[str, Callable[[Outcome], Floats]]] = [
        ("KV slots of blocks that sequences hold, of the pool", held),
        ("Sequences in flight, of the most that a step may have", rows),
        ("Tokens a step, of its budget", tokens),
    ]
    return _lines(outcomes, panels, "share (%)", "%{y:.1f} %")


def queues(outcomes: Sequence[Named]) -> Figure:
    """Requests by what they do."""

    def of(name: str) -> Callable[[Outcome], Floats]:
        return lambda outcome: outcome.timeline[name]

    panels = [
        ("Running: rows in flight", of("rows")),
        ("Waiting: not let in yet, or preempted and to be computed again", of("waiting")),
        ("Away: paused, swapped or loading", of("away")),
    ]
    return _lines(outcomes, panels, "requests", "%{y:,.1f} requests")


def _lines(
    outcomes: Sequence[Named], panels: Sequence[tuple[str, Callable[[Outcome], Floats]]], unit: str, hover: str
) -> Figure:
    """A panel above another, a line an outcome, one time axis."""
    domains = stacked(len(panels), gap=0.09)
    data: list[Figure] = []
    for named in outcomes:
        columns = named.outcome.timeline
        edges = edges_of(columns["end_s"], columns["seconds"], NUM_LINE_POINTS)
        for i, (_, values_of) in enumerate(panels):
            values = averaged(edges, columns["end_s"], columns["seconds"], values_of(named.outcome))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": named.label,
                    "meta": {"policy": named.policy},
                    "x": _narrow(edges),
                    "y": _narrow(_until_the_end(values)),
                    "xaxis": "x",
                    "yaxis": numbered("y", i),
                    "line": {"shape": "hv", "width": 1.2, "color": named.look.colour, "dash": named.look.dash},
                    "opacity": 0.85,
                    "hovertemplate": f"{hover} at %{{x:,.1f}} s<extra>{named.label}</extra>",
                }
            )
    axes: dict[str, Any] = {
        numbered("yaxis", i): axis(unit, domain=domain, rangemode="tozero") for i, domain in enumerate(domains)
    }
    titles = [panel_title(title, i) | {"xref": "paper"} for i, (title, _) in enumerate(panels)]
    below = numbered("y", len(panels) - 1)
    return figure(data, 190 * len(panels) + 40, xaxis=axis(_TIME, anchor=below), annotations=titles, **axes)


def _until_the_end(values: Floats) -> Floats:
    """A step line needs the last value at its last edge, too."""
    return np.append(values, values[-1:])


def _narrow(values: Floats) -> NDArray[np.float32]:
    """Half the bytes in the file, and far finer than a screen."""
    return values.astype(np.float32)
