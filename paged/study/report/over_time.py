"""Plots of steps: over virtual time the parts of KV memory, occupancy and queues; and a device's roofline with the steps below it.

A long timeline is shown as a few hundred or thousand time-weighted averages, which keep its integral.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.hardware import Roofline, StepWork
from paged.study.report.drawing import (
    QUIET,
    Figure,
    axis,
    beside,
    extent,
    figure,
    line,
    log_axis,
    numbered,
    panel_title,
)
from paged.study.report.naming import Named
from paged.study.simulator import Outcome

Floats = NDArray[np.float64]
_TIME = "virtual time (s)"

NUM_POINTS = 2000
NUM_LINE_POINTS = 400
"""Fewer for several outcomes in one plot, whose lines would fill the paper."""

# Dark to light, so that the split can be read without colours.
PARTS = {"tokens": "#3d5a75", "fragmentation": "#c8553d", "promised": "#e3b23c", "cached": "#b9cddb", "free": "#eaedf0"}
"""The parts of KV memory, from the bottom, with their colours."""


def parts_of(slots: float, held: Floats, filled: Floats, promised: Floats, cached: Floats) -> dict[str, Floats]:
    """Split the pool's KV slots into PARTS; together they are `slots`. Promised slots may lie on cached blocks, so cached slots are shown as far as
    they are neither held nor promised."""
    promised = np.minimum(promised, slots - held)
    cached = np.minimum(cached, slots - held - promised)
    free = slots - held - promised - cached
    return {"tokens": filled, "fragmentation": held - filled, "promised": promised, "cached": cached, "free": free}


def memory_parts(outcome: Outcome, edges: Floats) -> dict[str, Floats]:
    """Return KV slots by part, averaged between `edges`. Entries have cached blocks at their end, and the rest on average."""
    columns, result = outcome.timeline, outcome.result
    held, filled, promised, cached = (
        averaged(edges, columns["end_s"], columns["seconds"], columns[name], keeps=name == "cached")
        for name in ("held", "filled", "promised", "cached")
    )
    return parts_of(float(result.num_blocks * result.block_size), held, filled, promised, cached)


def memory(named: Named) -> Figure:
    """Plot one outcome's pool over time, split into parts."""
    result = named.outcome.result
    edges = edges_of(named.outcome.timeline["end_s"], named.outcome.timeline["seconds"], NUM_POINTS)
    slots = result.num_blocks * result.block_size
    data = [
        _steps(edges, values)
        | {
            "name": part,
            "stackgroup": "pool",
            "line": {"shape": "hv", "width": 0},
            "fillcolor": PARTS[part],
            "hovertemplate": "%{y:,.0f} slots<extra>" + part + "</extra>",
        }
        for part, values in memory_parts(named.outcome, edges).items()
    ]
    # The legend has the order of the parts, from the top.
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
    """Plot blocks, rows and tokens as shares of the most that a step can have."""

    def tokens(outcome: Outcome) -> Floats:
        computed = outcome.timeline["tokens"] / outcome.timeline["steps"]
        budget = outcome.result.max_tokens_per_step
        return np.full(len(computed), np.nan) if budget is None else 100 * computed / budget

    panels: dict[str, Callable[[Outcome], Floats]] = {
        "KV slots of blocks that sequences hold, of the pool": lambda outcome: (
            100 * outcome.timeline["held"] / (outcome.result.num_blocks * outcome.result.block_size)
        ),
        "Sequences in flight, of the most that a step may have": lambda outcome: (
            100 * outcome.timeline["rows"] / outcome.result.max_sequences
        ),
        "Tokens a step, of its budget": tokens,
    }
    return _lines(outcomes, panels, "share (%)", "%{y:.1f} %")


def queues(outcomes: Sequence[Named]) -> Figure:
    """Plot requests by state."""
    panels: dict[str, Callable[[Outcome], Floats]] = {
        "Running: rows in flight": lambda outcome: outcome.timeline["rows"],
        "Waiting: not let in yet, or preempted and to be computed again": lambda outcome: outcome.timeline["waiting"],
        "Away: paused, swapped or loading": lambda outcome: outcome.timeline["away"],
    }
    return _lines(outcomes, panels, "requests", "%{y:,.1f} requests")


def _lines(outcomes: Sequence[Named], panels: dict[str, Callable[[Outcome], Floats]], unit: str, hover: str) -> Figure:
    """Plot panels above one another with one time axis, and a line for each outcome."""
    data: list[Figure] = []
    for named in outcomes:
        columns = named.outcome.timeline
        edges = edges_of(columns["end_s"], columns["seconds"], NUM_LINE_POINTS)
        for i, values_of in enumerate(panels.values()):
            values = averaged(edges, columns["end_s"], columns["seconds"], values_of(named.outcome))
            data.append(
                _steps(edges, values)
                | named.drawn
                | {
                    "xaxis": "x",
                    "yaxis": numbered("y", i),
                    "line": {"shape": "hv", "width": 1.2, "color": named.look.colour, "dash": named.look.dash},
                    "opacity": 0.85,
                    "hovertemplate": f"{hover} at %{{x:,.1f}} s<extra>{named.label}</extra>",
                }
            )
    layout: dict[str, Any] = {
        numbered("yaxis", i): axis(unit, domain=domain, rangemode="tozero")
        for i, domain in enumerate(reversed(beside(len(panels), gap=0.09)))
    }
    titles = [panel_title(title, i) | {"xref": "paper"} for i, title in enumerate(panels)]
    below = numbered("y", len(panels) - 1)
    return figure(data, 190 * len(panels) + 40, xaxis=axis(_TIME, anchor=below), annotations=titles, **layout)


def _steps(edges: Floats, values: Floats) -> Figure:
    """Return a line of steps, which repeats the last value at its last edge. float32 takes half the bytes, and is finer than a screen."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": edges.astype(np.float32),
        "y": np.append(values, values[-1:]).astype(np.float32),
    }


def edges_of(end_s: Floats, seconds: Floats, num_points: int) -> Floats:
    """Return the bounds of at most `num_points` intervals that cover all entries, float64 [intervals + 1], rising.

    They are the entries' own bounds if these are few enough, and else of equal intervals. Without entries they are those of the first second.
    """
    if not len(end_s):
        return np.array([0.0, 1.0])
    starts = _starts(end_s, seconds)
    even = np.linspace(starts[0], end_s[-1], num_points + 1)
    if len(end_s) > num_points:
        return even
    bounds = np.unique(np.concatenate([starts, end_s]))
    return bounds if len(bounds) <= num_points + 1 else even


def averaged(edges: Floats, end_s: Floats, seconds: Floats, values: Floats, *, keeps: bool = False) -> Floats:
    """Return the average of `values` over each interval between `edges`, weighted by time, float64 [len(edges) − 1].

    Entry i has values[i] from end_s[i] − seconds[i] until end_s[i], all float64 [entries]. Between two entries the value is 0, or with `keeps` that of
    the entry before.
    """
    if not len(end_s):
        return np.zeros(len(edges) - 1)
    starts = _starts(end_s, seconds)
    # The integral over time is a straight line between two bounds, so any interval's part can be read off exactly.
    idle = np.concatenate([[0.0], starts[1:] - end_s[:-1]])
    before = np.concatenate([[0.0], values[:-1]]) if keeps else np.zeros_like(values)
    pieces = np.stack([idle * before, (end_s - starts) * values], axis=1).ravel()
    times = np.stack([starts, end_s], axis=1).ravel()
    integral = np.interp(edges, times, pieces.cumsum())
    return np.diff(integral) / np.diff(edges)


def _starts(end_s: Floats, seconds: Floats) -> Floats:
    """Return when each entry began. A gap of less than 1 ns to the end of the entry before is rounding, and is closed."""
    starts = end_s - seconds
    starts[1:] = np.where(starts[1:] < end_s[:-1] + 1e-9, end_s[:-1], starts[1:])
    return starts


NUM_STEPS = 500
"""The most entries of a timeline to draw, evenly picked."""


def roofline(outcomes: Sequence[Named]) -> Figure | None:
    """Plot arithmetic intensity against operations a second; None if no model on a device was simulated."""
    roofs: dict[tuple[str, str], Roofline] = {}
    data: list[Figure] = []
    for named in outcomes:
        roof = named.outcome.scenario.device.roofline()
        if roof is None:
            continue
        intensity, reached = points(named.outcome, roof)
        if not len(intensity):
            continue
        roofs.setdefault((roof.device.name, roof.dtype), roof)
        data.append(
            line(
                0,
                intensity.astype(np.float32),
                (reached / 1e12).astype(np.float32),
                "markers",
                showlegend=False,
                marker={"color": named.look.colour, "symbol": named.look.symbol, "size": 6, "opacity": 0.45},
                hovertemplate=f"%{{x:.3g}} FLOP/byte, %{{y:.3g}} TFLOP/s<extra>{named.label}</extra>",
                **named.drawn,
            )
        )
    if not data:
        return None
    low, high = extent(data, "x")
    high = max(high, *(roof.device.ridge(roof.dtype) for roof in roofs.values())) * 2
    for roof in roofs.values():
        data += _roof_lines(roof, low, high)
    return figure(
        data,
        460,
        showlegend=True,
        # Its names are sentences: under the plot, where they cover nothing.
        legend={"orientation": "h", "yref": "container", "itemclick": False, "itemdoubleclick": False},
        xaxis=log_axis("arithmetic intensity (FLOP/byte, logarithmic)", low, high),
        yaxis=log_axis("reached on one device (TFLOP/s, logarithmic)", *extent(data, "y")),
        margin={"l": 72, "r": 24, "t": 24, "b": 52},
    )


def points(outcome: Outcome, roof: Roofline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return FLOP/byte and FLOP/s of the mean steps of at most `NUM_STEPS` entries, float64 [n] each.

    They count the work by which the cost model timed the steps, so by a roofline none lies above its roof.
    """
    columns = outcome.timeline
    drawn = np.flatnonzero((columns["tokens"] > 0) & (columns["seconds"] > 0))
    if len(drawn) > NUM_STEPS:
        drawn = drawn[np.linspace(0, len(drawn) - 1, NUM_STEPS).astype(int)]
    steps = columns["steps"][drawn]
    tokens, sampled, context, pairs = (
        columns[name][drawn] / steps for name in ("tokens", "sampled", "context", "pairs")
    )
    work = StepWork(
        computed_tokens=tokens,
        sampled_rows=sampled,
        context_tokens=context,
        attended_pairs=pairs,
        rows=columns["rows"][drawn],
    )
    flops = roof.flops(work)
    return flops / roof.bytes_read(work), flops * steps / columns["seconds"][drawn]


def _roof_lines(roof: Roofline, low: float, high: float) -> list[Figure]:
    """Draw the published roof, and the one that the cost model assumes to be reached."""
    peak, bandwidth = roof.device.peak(roof.dtype), roof.device.bandwidth
    drawn = (
        ("solid", 1.0, 1.0, "published"),
        ("dot", roof.compute_efficiency, roof.memory_efficiency, "assumed to be reached"),
    )
    lines = []
    for dash, of_peak, of_bandwidth, what in drawn:
        compute, memory = peak * of_peak, bandwidth * of_bandwidth
        x = np.array([low, compute / memory, high])
        name = (
            f"{roof.device.name} {roof.dtype}, {what}: {compute / 1e12:,.0f} TFLOP/s, {memory / 1e12:,.2f} TB/s, "
            f"corner at {compute / memory:,.0f} FLOP/byte"
        )
        hover = "%{x:.3g} FLOP/byte, %{y:.3g} TFLOP/s<extra></extra>"
        look = {"color": QUIET, "dash": dash, "width": 1.5}
        lines.append(line(0, x, np.minimum(compute, memory * x) / 1e12, name=name, line=look, hovertemplate=hover))
    return lines
