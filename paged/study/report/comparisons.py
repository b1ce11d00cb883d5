"""Plots that compare policies: preemptions and waste, distributions, latency under load, cost."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.report.drawing import (
    Figure,
    axes,
    axis,
    beside,
    count_axis,
    extent,
    figure,
    line,
    log_axis,
    numbered,
    on,
    panel_title,
)
from paged.study.report.naming import Named
from paged.study.simulator import SimulationResult, grouped

_BAR = 30
"""Pixels of height a bar."""
_QUANTILES = 400

Figures = Callable[[SimulationResult], float | None]
Kinds = dict[str, Figures]
"""By name."""


def preemptions(outcomes: Sequence[Named]) -> Figure:
    """Plot preemptions and the tokens that they cost, by kind, with the share of waste."""
    counted: Kinds = {
        "recompute": lambda result: result.preemptions.recompute,
        "swap": lambda result: result.preemptions.swap,
    }
    lost: Kinds = {
        "computed again": lambda result: result.wasted_tokens,
        "swapped out": lambda result: result.swapped_out_blocks * result.block_size,
        "swapped in": lambda result: result.swapped_in_blocks * result.block_size,
    }
    left, right = beside(2, 0.06)
    data = [*_bars(outcomes, counted, 0), *_bars(outcomes, lost, 1)]
    totals = [
        _beside_bar(outcomes, counted, 0, lambda result, total: f"{total:,.0f}"),
        _beside_bar(outcomes, lost, 1, lambda result, total: f"{total:,.0f} · {result.waste:.2%}"),
    ]
    return figure(
        data + totals,
        _height(outcomes),
        barmode="stack",
        bargap=0.35,
        xaxis=_counts("preemptions (count)", outcomes, counted, domain=left),
        xaxis2=_counts("tokens", outcomes, lost, domain=right, anchor="y2"),
        yaxis=_names(outcomes),
        yaxis2=_names(outcomes) | {"anchor": "x2", "showticklabels": False},
        annotations=[panel_title("Preemptions", 0), panel_title("Wasted tokens, and of all computed", 1)],
    )


def cost(outcomes: Sequence[Named]) -> Figure | None:
    """Plot the price of a million output tokens; None without a price per hour."""
    priced = [named for named in outcomes if named.outcome.result.cost_per_million_tokens is not None]
    if not priced:
        return None
    kinds: Kinds = {"cost": lambda result: result.cost_per_million_tokens}
    return figure(
        [*_bars(priced, kinds, 0), _beside_bar(priced, kinds, 0, lambda result, total: f"{total:,.3g}")],
        _height(priced) - 20,
        bargap=0.35,
        margin={"l": 64, "r": 24, "t": 8, "b": 52},
        xaxis=axis("price of 1,000,000 output tokens (unit of the price per hour)", range=[0, _room(priced, kinds)]),
        yaxis=_names(priced),
    )


def distributions(outcomes: Sequence[Named]) -> Figure:
    """Plot the share of requests with at most so many seconds, without requests that lack the figure (rejected, one token)."""
    panels = {
        "Time to first token": "ttft_s",
        "Longest gap between two tokens of a request": "longest_gap_s",
        "End to end": "e2e_s",
    }
    data = []
    for named in outcomes:
        for i, field in enumerate(panels.values()):
            seconds, shares = cumulative(getattr(named.outcome, field))
            data.append(
                line(
                    i,
                    seconds.astype(np.float32),
                    (100 * shares).astype(np.float32),
                    line={"shape": "hv", "width": 1.8, "color": named.look.colour, "dash": named.look.dash},
                    hovertemplate=f"%{{y:.1f}} % within %{{x:.3g}} s<extra>{named.label}</extra>",
                    **named.drawn,
                )
            )
    layout: Figure = {}
    for i, domain in enumerate(beside(len(panels), 0.06)):
        across = log_axis("seconds (s, logarithmic)", *extent(data, "x", numbered("x", i)), domain=domain)
        layout |= axes(i, across, axis("" if i else "share of requests (%)", range=[0, 101]))
    return figure(data, 340, annotations=[panel_title(title, i) for i, title in enumerate(panels)], **layout)


def cumulative(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rising values and the shares at or below each, float64 [n] each, at `_QUANTILES` even ranks and at each of the last hundred.

    NaN is left out. A logarithmic axis cannot show 0, which counts in the shares alone.
    """
    known = np.sort(seconds[~np.isnan(seconds)])
    total = len(known)
    ranks = np.unique(
        np.concatenate(
            [np.linspace(0, total - 1, min(total, _QUANTILES)).astype(int), np.arange(max(0, total - 100), total)]
        )
    )
    ranks = ranks[known[ranks] > 0]
    return known[ranks], (ranks + 1) / max(total, 1)


def under_load(outcomes: Sequence[Named]) -> Figure | None:
    """Plot throughput and latency of each load, averaged over seeds: a line for each policy over rising loads, or a point for one load.

    A latency that no outcome has gets no panel.
    """
    latencies: Kinds = {
        "p99 of time to first token": lambda result: result.ttft_s.p99,
        "p99 of each request's longest gap": lambda result: result.longest_gap_s.p99,
    }
    panels = {
        title: latency for title, latency in latencies.items() if any(latency(one.outcome.result) for one in outcomes)
    }
    if not panels:
        return None
    data = [
        drawn
        for group in grouped(outcomes, lambda named: named.policy).values()
        for i, latency in enumerate(panels.values())
        if (drawn := _load_line(group, latency, i)) is not None
    ]
    layout: Figure = {}
    for i, domain in enumerate(beside(len(panels))):
        across = axis("throughput (output tokens/s)", domain=domain)
        layout |= axes(i, across, log_axis("seconds (s, logarithmic)", *extent(data, "y", numbered("y", i))))
    return figure(data, 400, annotations=[panel_title(title, i) for i, title in enumerate(panels)], **layout)


def _load_line(group: Sequence[Named], latency: Figures, panel: int) -> Figure | None:
    """Draw one policy's loads, lightest first: mean, smallest and largest over seeds."""
    loads, rates, seconds = [], [], []
    lightest_first = sorted(
        group, key=lambda one: (one.outcome.scenario.load.clients or 0, one.outcome.scenario.load.rate)
    )
    for same in grouped(lightest_first, lambda one: one.load).values():
        results = [named.outcome.result for named in same]
        known = [value for result in results if (value := latency(result)) is not None and value > 0]
        if known:
            loads.append(same[0].load or same[0].outcome.load.pace(same[0].outcome.scenario.load.rate))
            rates.append([result.throughput for result in results])
            seconds.append(known)
    if not loads:
        return None
    look, name = group[0].look, group[0].policy
    drawn = line(
        panel,
        [np.mean(values) for values in rates],
        [np.mean(values) for values in seconds],
        "lines+markers" if len(loads) > 1 else "markers",
        name=name,
        meta={"policy": name},
        text=loads,
        line={"color": look.colour, "dash": look.dash, "width": 1.8},
        marker={"color": look.colour, "symbol": look.symbol, "size": 9},
        hovertemplate=f"%{{text}}: %{{x:,.0f}} tokens/s, %{{y:.3g}} s<extra>{name}</extra>",
    )
    if max(map(len, rates)) > 1:
        drawn |= {"error_x": _whiskers(rates), "error_y": _whiskers(seconds)}
    return drawn


def _whiskers(samples: Sequence[Sequence[float]]) -> Figure:
    """Return bars from the mean of each list to its largest and its smallest."""
    mean, low, high = (np.array([of(values) for values in samples]) for of in (np.mean, np.min, np.max))
    return {"type": "data", "array": high - mean, "arrayminus": mean - low, "thickness": 1, "width": 3}


def _bars(outcomes: Sequence[Named], kinds: Kinds, panel: int) -> list[Figure]:
    """Draw a horizontal bar for each outcome, stacked of kinds: the first solid, the others hatched."""
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "meta": {"policy": named.policy},
            "y": [named.label],
            "x": [value_of(named.outcome.result)],
            "marker": {
                "color": named.look.colour,
                "pattern": {"shape": pattern, "size": 6, "fgcolor": named.look.colour, "bgcolor": "#fff"},
                "line": {"color": named.look.colour, "width": 1},
            },
            "hovertemplate": f"%{{x:,.6~g}}<extra>{named.label}: {kind}</extra>",
        }
        | on(panel)
        for named in outcomes
        for (kind, value_of), pattern in zip(kinds.items(), ("", "/", "x"))
    ]


def _beside_bar(
    outcomes: Sequence[Named], kinds: Kinds, panel: int, text_of: Callable[[SimulationResult, float], str]
) -> Figure:
    """Draw the text at the end of each bar."""
    totals = [_total(named, kinds) for named in outcomes]
    return line(
        panel,
        totals,
        [named.label for named in outcomes],
        "text",
        text=[f" {text_of(named.outcome.result, total)}" for named, total in zip(outcomes, totals)],
        textposition="middle right",
        textfont={"size": 12},
        hoverinfo="skip",
        cliponaxis=False,
    )


def _total(named: Named, kinds: Kinds) -> float:
    return sum(value_of(named.outcome.result) or 0.0 for value_of in kinds.values())


def _room(outcomes: Sequence[Named], kinds: Kinds) -> float:
    """Return the end of an axis with room for text beside the longest bar."""
    return 1.35 * max(1e-9, *(_total(named, kinds) for named in outcomes))


def _counts(title: str, outcomes: Sequence[Named], kinds: Kinds, **more: Any) -> Figure:
    # Without counts there is still an axis to read.
    high = max(1.0, _room(outcomes, kinds))
    return count_axis(title, high, range=[0, high], **more)


def _names(outcomes: Sequence[Named]) -> Figure:
    labels = [named.label for named in outcomes]
    return axis(
        "",
        type="category",
        categoryorder="array",
        categoryarray=labels[::-1],
        showgrid=False,
        ticks="",
        range=[-0.6, len(labels) - 0.4],
    )


def _height(outcomes: Sequence[Named]) -> int:
    return _BAR * len(outcomes) + 100
