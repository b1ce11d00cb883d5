"""Plots in which policies stand side by side: preemptions and waste, distributions, latency under load, cost."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.report.drawing import Figure, axis, beside, count_axis, extent, figure, log_axis, numbered, panel_title
from paged.study.report.naming import Named
from paged.study.simulator import SimulationResult

_BAR = 30
"""Pixels of height a bar."""
_QUANTILES = 400

Figures = Callable[[SimulationResult], float | None]


def preemptions(outcomes: Sequence[Named]) -> Figure:
    """How often a running request gave blocks back, and how many tokens that cost, by kind; the share of waste beside it."""
    counted: list[tuple[str, Figures]] = [
        ("recompute", lambda result: result.preemptions.recompute),
        ("swap", lambda result: result.preemptions.swap),
    ]
    lost: list[tuple[str, Figures]] = [
        ("computed again", lambda result: result.wasted_tokens),
        ("swapped out", lambda result: result.swapped_out_blocks * result.block_size),
        ("swapped in", lambda result: result.swapped_in_blocks * result.block_size),
    ]
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
    """Price of a million output tokens, where a price per hour was given."""
    priced = [named for named in outcomes if named.outcome.result.cost_per_million_tokens is not None]
    if not priced:
        return None
    kinds: list[tuple[str, Figures]] = [("cost", lambda result: result.cost_per_million_tokens)]
    text = _beside_bar(priced, kinds, 0, lambda result, total: f"{total:,.3g}")
    return figure(
        [*_bars(priced, kinds, 0), text],
        _height(priced) - 20,
        bargap=0.35,
        margin={"l": 64, "r": 24, "t": 8, "b": 52},
        xaxis=axis("price of 1,000,000 output tokens (unit of the price per hour)", range=_room(priced, kinds)),
        yaxis=_names(priced),
    )


def distributions(outcomes: Sequence[Named]) -> Figure:
    """What share of the requests had at most so many seconds; requests without the figure (rejected, one token) are left out."""
    panels = (
        ("Time to first token", "ttft_s"),
        ("Longest gap between two tokens of a request", "longest_gap_s"),
        ("End to end", "e2e_s"),
    )
    domains = beside(len(panels), 0.06)
    data = []
    for named in outcomes:
        for i, (_, field) in enumerate(panels):
            seconds, shares = cumulative(getattr(named.outcome, field))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": named.label,
                    "meta": {"policy": named.policy},
                    "x": seconds.astype(np.float32),
                    "y": (100 * shares).astype(np.float32),
                    "xaxis": numbered("x", i),
                    "yaxis": numbered("y", i),
                    "line": {"shape": "hv", "width": 1.8, "color": named.look.colour, "dash": named.look.dash},
                    "hovertemplate": f"%{{y:.1f}} % within %{{x:.3g}} s<extra>{named.label}</extra>",
                }
            )
    axes: dict[str, Any] = {}
    for i, domain in enumerate(domains):
        low, high = extent(data, "x", numbered("x", i))
        axes[numbered("xaxis", i)] = log_axis(
            "seconds (s, logarithmic)", low, high, domain=domain, anchor=numbered("y", i)
        )
        title = "share of requests (%)" if i == 0 else ""
        axes[numbered("yaxis", i)] = axis(title, range=[0, 101], anchor=numbered("x", i))
    return figure(data, 340, annotations=[panel_title(title, i) for i, (title, _) in enumerate(panels)], **axes)


def cumulative(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rising values and the shares at or below each, at `_QUANTILES` even ranks and at every one of the last hundred.

    float64 [n] each. Of NaN and of what a logarithmic axis cannot show (0) nothing is returned; 0 counts in the shares.
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
    """Throughput and latency of each load: a line a policy where the load rises, a point where it does not. Seeds are averaged.

    A latency that no outcome has gets no panel.
    """
    latencies: list[tuple[str, Figures]] = [
        ("p99 of time to first token", lambda result: result.ttft_s.p99),
        ("p99 of each request's longest gap", lambda result: result.longest_gap_s.p99),
    ]
    panels = [(title, latency) for title, latency in latencies if any(latency(one.outcome.result) for one in outcomes)]
    if not panels:
        return None
    data = [
        trace
        for group in _groups(outcomes, lambda named: named.policy)
        for i, (_, latency) in enumerate(panels)
        if (trace := _load_line(group, latency, i)) is not None
    ]
    axes: dict[str, Any] = {}
    for i, domain in enumerate(beside(len(panels))):
        axes[numbered("xaxis", i)] = axis("throughput (output tokens/s)", domain=domain, anchor=numbered("y", i))
        low, high = extent(data, "y", numbered("y", i))
        axes[numbered("yaxis", i)] = log_axis("seconds (s, logarithmic)", low, high, anchor=numbered("x", i))
    return figure(data, 400, annotations=[panel_title(title, i) for i, (title, _) in enumerate(panels)], **axes)


def _load_line(group: Sequence[Named], latency: Figures, panel: int) -> Figure | None:
    """One policy's loads, lightest first; mean, smallest and largest of what differs by seed alone."""
    loads, rates, seconds = [], [], []
    for same in sorted(_groups(group, lambda named: named.load), key=_heaviness):
        results = [named.outcome.result for named in same]
        known = [value for result in results if (value := latency(result)) is not None and value > 0]
        if known:
            loads.append(same[0].load or same[0].outcome.load.pace(same[0].outcome.scenario.load.rate))
            rates.append([result.throughput for result in results])
            seconds.append(known)
    if not loads:
        return None
    look, name = group[0].look, group[0].policy
    across, up = _spread(rates), _spread(seconds)
    line: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if len(loads) > 1 else "markers",
        "name": name,
        "meta": {"policy": name},
        "x": across[0],
        "y": up[0],
        "xaxis": numbered("x", panel),
        "yaxis": numbered("y", panel),
        "text": loads,
        "line": {"color": look.colour, "dash": look.dash, "width": 1.8},
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
        "hovertemplate": f"%{{text}}: %{{x:,.0f}} tokens/s, %{{y:.3g}} s<extra>{name}</extra>",
    }
    if max(map(len, rates)) > 1:
        line |= {"error_x": _whiskers(*across), "error_y": _whiskers(*up)}
    return line


def _heaviness(same: Sequence[Named]) -> tuple[float, float]:
    load = same[0].outcome.scenario.load
    return load.clients or 0, load.rate


def _spread(samples: Sequence[Sequence[float]]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean, smallest and largest of each list, float64 [lists] each."""
    mean, low, high = (np.array([of(values) for values in samples], np.float64) for of in (np.mean, np.min, np.max))
    return mean, low, high


def _whiskers(mean: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> Figure:
    return {"type": "data", "array": high - mean, "arrayminus": mean - low, "thickness": 1, "width": 3}


def _groups(outcomes: Sequence[Named], key: Callable[[Named], str]) -> list[list[Named]]:
    groups: dict[str, list[Named]] = {}
    for named in outcomes:
        groups.setdefault(key(named), []).append(named)
    return list(groups.values())


def _bars(outcomes: Sequence[Named], kinds: Sequence[tuple[str, Figures]], panel: int) -> list[Figure]:
    """A horizontal bar an outcome, stacked of kinds: the first solid, the others hatched."""
    patterns = ("", "/", "x")
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "meta": {"policy": named.policy},
            "y": [named.label],
            "x": [value_of(named.outcome.result)],
            "xaxis": numbered("x", panel),
            "yaxis": numbered("y", panel),
            "marker": {
                "color": named.look.colour,
                "pattern": {"shape": pattern, "size": 6, "fgcolor": named.look.colour, "bgcolor": "#fff"},
                "line": {"color": named.look.colour, "width": 1},
            },
            "hovertemplate": f"%{{x:,.6~g}}<extra>{named.label}: {kind}</extra>",
        }
        for named in outcomes
        for (kind, value_of), pattern in zip(kinds, patterns)
    ]


def _beside_bar(
    outcomes: Sequence[Named],
    kinds: Sequence[tuple[str, Figures]],
    panel: int,
    text_of: Callable[[SimulationResult, float], str],
) -> Figure:
    """The text at the end of each bar."""
    totals = [_total(named, kinds) for named in outcomes]
    return {
        "type": "scatter",
        "mode": "text",
        "x": totals,
        "y": [named.label for named in outcomes],
        "text": [f" {text_of(named.outcome.result, total)}" for named, total in zip(outcomes, totals)],
        "textposition": "middle right",
        "textfont": {"size": 12},
        "xaxis": numbered("x", panel),
        "yaxis": numbered("y", panel),
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def _total(named: Named, kinds: Sequence[tuple[str, Figures]]) -> float:
    return sum(value_of(named.outcome.result) or 0.0 for _, value_of in kinds)


def _room(outcomes: Sequence[Named], kinds: Sequence[tuple[str, Figures]]) -> list[float]:
    """A range that leaves room for text beside the longest bar."""
    return [0, 1.35 * max(1e-9, *(_total(named, kinds) for named in outcomes))]


def _counts(title: str, outcomes: Sequence[Named], kinds: Sequence[tuple[str, Figures]], **more: Any) -> Figure:
    room = _room(outcomes, kinds)
    # Where nothing was counted there is still an axis to read.
    high = max(1.0, room[1])
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
