"""The roofline of a device with the steps of simulations."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged.study.hardware import Roofline, StepWork
from paged.study.report.drawing import QUIET, Figure, extent, figure, line, log_axis
from paged.study.report.naming import Named
from paged.study.simulator import Outcome

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
        data += _lines(roof, low, high)
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


def _lines(roof: Roofline, low: float, high: float) -> list[Figure]:
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
