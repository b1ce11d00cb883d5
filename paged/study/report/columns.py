"""An outcome as one row of a table, and a CSV file of such rows."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paged import __version__
from paged.base.whole_file import whole_file
from paged.study.simulator import Outcome

Cell = str | int | float | bool | None

_WITH_UNITS = {
    "throughput": "throughput_tokens_per_s",
    "memory_of_held": "memory_of_held_share",
    "memory_of_pool": "memory_of_pool_share",
    "memory_while_waiting_of_held": "memory_while_waiting_of_held_share",
    "memory_while_waiting_of_pool": "memory_while_waiting_of_pool_share",
    "peak_block_usage": "peak_block_usage_share",
    "mean_block_usage": "mean_block_usage_share",
    "row_occupancy": "row_occupancy_share",
    "token_occupancy": "token_occupancy_share",
    "prefix_hit_rate": "prefix_hit_rate_share",
    "waste": "waste_share",
}
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
