"""The roofline of a device with a simulation's steps on it.

Knows what a step asked of the device as far as a timeline tells: computed tokens, rows and filled slots. Does not know rows one by one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged.hardware import Roofline, StepWork
from paged.report.drawing import QUIET, Figure, figure, log_axis
from paged.report.naming import Named
from paged.simulator import Outcome

NUM_STEPS = 500
"""Entries of a timeline that are drawn, evenly picked."""


def roofline(outcomes: Sequence[Named]) -> Figure | None:
    """Arithmetic intensity against operations a second, where a model on a device was simulated."""
    roofs: dict[tuple[str, str], Roofline] = {}
    data: list[Figure] = []
    for named in outcomes:
        roof = named.outcome.scenario.device.roofline()
        if roof is None:
            continue
        roofs.setdefault((roof.device.name, roof.dtype), roof)
        intensity, reached = points(named.outcome, roof)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": named.label,
                "meta": {"policy": named.policy},
                "x": intensity.astype(np.float32),
                "y": (reached / 1e12).astype(np.float32),
                "marker": {"color": named.look.colour, "symbol": named.look.symbol, "size": 6, "opacity": 0.45},
                "hovertemplate": f"%{{x:.3g}} FLOP/byte, %{{y:.3g}} TFLOP/s<extra>{named.label}</extra>",
            }
        )
    if not data:
        return None
    low = min(float(trace["x"].min()) for trace in data)
    high = max(float(trace["x"].max()) for trace in data)
    notes: list[Figure] = []
    for roof in roofs.values():
        lines, said = _lines(roof, low / 2, max(high, roof.device.ridge(roof.dtype)) * 3)
        data += lines
        notes += said
    return figure(
        data,
        460,
        xaxis=log_axis("arithmetic intensity (FLOP/byte, logarithmic)"),
        yaxis=log_axis("reached on one device (TFLOP/s, logarithmic)"),
        annotations=notes,
        margin={"l": 72, "r": 24, "t": 24, "b": 52},
    )


def points(outcome: Outcome, roof: Roofline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """FLOP/byte and FLOP/s of at most `NUM_STEPS` entries, float64 [n] each.

    Estimated: a step reads the KV of all filled slots, and each of its tokens attends to the mean context, filled ÷ rows. Of a prompt's chunk that is
    too many, by half of what a prompt without a history attends to itself; content that rows share is read once here and once a row there.
    """
    columns = outcome.timeline
    drawn = np.flatnonzero((columns["tokens"] > 0) & (columns["seconds"] > 0))
    if len(drawn) > NUM_STEPS:
        drawn = drawn[np.linspace(0, len(drawn) - 1, NUM_STEPS).astype(int)]
    steps, rows, filled = (columns[name][drawn] for name in ("steps", "rows", "filled"))
    tokens = columns["tokens"][drawn] / steps
    work = StepWork(
        computed_tokens=tokens,
        sampled_rows=rows,
        context_tokens=filled,
        attended_pairs=tokens * filled / np.maximum(rows, 1),
    )
    flops = roof.flops(work)
    return flops / roof.bytes_read(work), flops * steps / columns["seconds"][drawn]


def _lines(roof: Roofline, low: float, high: float) -> tuple[list[Figure], list[Figure]]:
    """The published roof, and the one that the cost model assumes to be reached, with their names."""
    peak, bandwidth, name = roof.device.peak(roof.dtype), roof.device.bandwidth, roof.device.name
    ridge = roof.device.ridge(roof.dtype)
    lines, notes = [], []
    for dash, compute, memory, what in (
        ("solid", 1.0, 1.0, "published"),
        ("dot", roof.compute_efficiency, roof.memory_efficiency, "assumed to be reached"),
    ):
        corner = peak * compute / (bandwidth * memory)
        x = np.array([low, corner, high])
        y = np.minimum(peak * compute, bandwidth * memory * x) / 1e12
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}, {what}",
                "x": x,
                "y": y,
                "line": {"color": QUIET, "dash": dash, "width": 1.5},
                "hovertemplate": f"%{{x:.3g}} FLOP/byte, %{{y:.3g}} TFLOP/s<extra>{name}, {what}</extra>",
            }
        )
        text = (
            f"{name} {roof.dtype}, {what}: {peak * compute / 1e12:,.0f} TFLOP/s, {bandwidth * memory / 1e12:,.2f} TB/s"
        )
        notes.append(
            {
                "x": np.log10(high),
                "y": np.log10(y[-1]),
                "text": text,
                "showarrow": False,
                "xanchor": "right",
                "yanchor": "bottom" if dash == "solid" else "top",
                "font": {"size": 12, "color": QUIET},
            }
        )
    notes.append(
        {
            "x": np.log10(ridge),
            "y": np.log10(peak / 1e12),
            "text": f"{ridge:,.0f} FLOP/byte",
            "showarrow": True,
            "arrowhead": 0,
            "arrowcolor": QUIET,
            "ax": -50,
            "ay": -14,
            "font": {"size": 12, "color": QUIET},
        }
    )
    return lines, notes
