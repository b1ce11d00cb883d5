"""The summary, a line for each figure and a column for each outcome; and CSV, a row for each outcome."""

import csv
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from paged import __version__
from paged.base.whole_file import whole_file
from paged.study.report.naming import Named
from paged.study.simulator import Outcome, SimulationResult


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


class Line(msgspec.Struct, frozen=True, eq=False):
    """One figure of each outcome.

    figure  field of a result, with dots, or a function of one
    form    format or function that shows it; a unit of % multiplies by 100
    best    the good end: max, min, or None for neither
    """

    name: str
    unit: str
    figure: str | Callable[[SimulationResult], float | None]
    form: str | Callable[[float], str] = ",.0f"
    best: Callable[[Sequence[float]], float] | None = None

    def value(self, result: SimulationResult) -> float | None:
        """Return the figure of one outcome; None if it has none."""
        value: float | None = (attrgetter(self.figure) if isinstance(self.figure, str) else self.figure)(result)
        return 100 * value if self.unit == "%" and value is not None else value

    def text(self, value: float | None) -> str:
        """Return a value as text."""
        if value is None:
            return "–"
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)

    def cells(self, outcomes: Sequence[Named]) -> list[tuple[str, bool]]:
        """Return a text for each outcome, and whether it is the best; none is if all texts are equal."""
        values = [self.value(named.outcome.result) for named in outcomes]
        texts = list(map(self.text, values))
        known = [value for value in values if value is not None]
        best = self.text(self.best(known)) if self.best and known and len(set(texts)) > 1 else None
        return [(text, text == best) for text in texts]


_GROUPS = {
    "Throughput": [
        Line("Output tokens", "tokens/s", "throughput", ",.1f", max),
        Line("Requests", "requests/s", "requests_per_s", ",.3f", max),
        Line("Makespan", "s", "makespan_s", ",.1f", min),
        Line("Price of 1,000,000 output tokens", "", "cost_per_million_tokens", ",.3f", min),
    ],
    "Latency": [
        Line(f"{name}, {percentile}", "s", f"{field}.{percentile}", _seconds, min)
        for name, field in (
            ("Time to first token", "ttft_s"),
            ("Between tokens", "itl_s"),
            ("Longest gap of a request", "longest_gap_s"),
            ("End to end", "e2e_s"),
        )
        for percentile in ("p50", "p90", "p99")
    ],
    "Memory": [
        Line("Tokens, of what is held or promised", "%", "memory.of_held", ".1f", max),
        Line("Tokens, of the pool", "%", "memory.of_pool", ".1f", max),
        Line("… of what is held, while requests wait", "%", "memory_while_waiting.of_held", ".1f", max),
        Line("… of the pool, while requests wait", "%", "memory_while_waiting.of_pool", ".1f", max),
        Line("Blocks held, mean", "%", "mean_block_usage", ".1f"),
        Line("Blocks held, peak", "%", "peak_block_usage", ".1f"),
        Line("Rows in flight, of the most allowed", "%", "row_occupancy", ".1f"),
        Line("Tokens a step, of the budget", "%", "token_occupancy", ".1f"),
        Line("Prompt tokens hit in the prefix cache", "%", "prefix_hit_rate", ".1f"),
    ],
    "Preemptions": [
        Line("By recompute", "", "preemptions.recompute"),
        Line("By swap", "", "preemptions.swap"),
        Line("Most of one request", "", "max_preemptions", best=min),
        Line("Tokens computed again", "tokens", "wasted_tokens", best=min),
        Line("Blocks swapped out", "blocks", "swapped_out_blocks"),
        Line("Blocks swapped in", "blocks", "swapped_in_blocks"),
        Line("Waste, of all computed tokens", "%", "waste", ",.2f", min),
    ],
    "Requests and steps": [
        Line("Requests", "", "requests"),
        Line("Finished", "", "finished"),
        Line("Rejected", "", "rejected"),
        Line("Output", "tokens", "output_tokens"),
        Line("Token budget", "tokens/step", "max_tokens_per_step"),
        Line("Pool", "blocks", "num_blocks"),
        Line("Steps", "", "steps"),
        Line("Invariant violations in checked steps", "", lambda r: r.violations if r.checked_steps else None),
        Line("Simulated in, real time", "s", "wall_s", ",.1f"),
    ],
}


def lines(outcomes: Sequence[Named]) -> list[tuple[str, list[Line]]]:
    """Return the lines under their headings, without figures that no outcome has (such as cost without a price)."""
    results = [named.outcome.result for named in outcomes]
    shown = {
        heading: [line for line in group if any(line.value(result) is not None for result in results)]
        for heading, group in _GROUPS.items()
    }
    return [(heading, group) for heading, group in shown.items() if group]


Cell = str | int | float | bool | None

_SHARES = (
    "memory_of_held", "memory_of_pool", "memory_while_waiting_of_held", "memory_while_waiting_of_pool",
    "peak_block_usage", "mean_block_usage", "row_occupancy", "token_occupancy", "prefix_hit_rate", "waste",
)  # fmt: skip
_WITH_UNITS = {"throughput": "throughput_tokens_per_s", **{name: f"{name}_share" for name in _SHARES}}
"""Columns of fields without a unit in their name. Shares are from 0 to 1."""


def flat(outcome: Outcome) -> dict[str, Cell]:
    """Return options and results of a simulation, a value a column. Units end the names: `_s` virtual seconds, `_tokens`, `_share` from 0 to 1.

    The scenario's fields come first; if the result has one, too (such as a budget that was chosen), its value counts.
    """
    scenario = outcome.scenario
    row: dict[str, Cell] = {"paged_version": __version__}
    row |= _flattened(scenario.load)
    row |= _flattened(scenario.device)
    row |= {"price_per_hour": scenario.price_per_hour, "applied": "; ".join(outcome.applied)}
    row |= _flattened(outcome.result)
    # The load's name is a path or a description; the result's is the trace's name.
    row["trace"] = outcome.result.trace
    return {_WITH_UNITS.get(name, name): value for name, value in row.items()}


def write_csv(path: str | Path, outcomes: Sequence[Outcome]) -> None:
    """Write a row for each outcome. Raises UnwritablePath."""
    write_rows(path, [flat(outcome) for outcome in outcomes])


def write_rows(path: str | Path, rows: Sequence[dict[str, Cell]]) -> None:
    """Write a header and these rows; a missing value is an empty cell. Raises UnwritablePath."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with whole_file(path, newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flattened(struct: msgspec.Struct) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name in struct.__struct_fields__:
        value: Any = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            # Percentiles of seconds: the percentile goes before the unit.
            stem, unit = (name[:-2], "_s") if name.endswith("_s") else (name, "")
            row |= {f"{stem}_{inner}{unit}": cell for inner, cell in _flattened(value).items()}
        elif isinstance(value, tuple):
            row[name] = "; ".join(map(str, value))
        else:
            row[name] = value
    return row
