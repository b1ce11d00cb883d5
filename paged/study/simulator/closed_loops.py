"""Measured closed loops against their simulation: a table with a line for each model, engine, device and concurrency.

    backend, version, model, system, precision, input_tokens, output_tokens, concurrency, tensor_parallel, ttft_ms, tpot_ms

ttft_ms and tpot_ms are means over the requests of a run. As many clients as `concurrency` each send their next request, of
about one length, when their last one has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from paged.errors import BadRun
from paged.study.hardware.files import csv_rows
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.simulator.recorded_run import RunSetup
from paged.study.simulator.study import grouped
from paged.study.simulator.validation import Prepared, RunOptions, prepared, simulation_of
from paged.study.traces import Trace

COLUMNS = (
    "backend",
    "version",
    "model",
    "system",
    "precision",
    "input_tokens",
    "output_tokens",
    "concurrency",
    "tensor_parallel",
    "ttft_ms",
    "tpot_ms",
)
_ROUNDS, _SHORTEST = 10, 0.8
"""Requests of each client, and the shortest length as a share of the named one. The tables do not say, so these are what serving benchmarks commonly
do. With one exact length, clients would stay together, and all prompts would come at once."""
_ENGINES = {"vllm": "vllm-0.24", "trtllm": "tensorrt-llm-1.0"}
_PRECISIONS = {"": "bf16", "bfloat16": "bf16", "bf16": "bf16", "fp8": "fp8", "float16": "fp16", "fp16": "fp16"}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A line and its simulation, in seconds."""

    backend: str
    model: str
    device: str
    dtype: str
    prompt_tokens: int
    output_tokens: int
    clients: int
    tensor_parallel: int
    ttft_s: float
    tpot_s: float
    simulated_ttft_s: float
    simulated_tpot_s: float
    assumed: tuple[str, ...] = ()

    @property
    def ttft_error(self) -> float:
        """Signed share of the measured."""
        return self.simulated_ttft_s / self.ttft_s - 1

    @property
    def tpot_error(self) -> float:
        """Signed share of the measured."""
        return self.simulated_tpot_s / self.tpot_s - 1


def closed_loops(path: str | Path, options: RunOptions | None = None) -> Iterator[Cell]:
    """Simulate each line, in order. Raises BadRun with file and row, OSError, and what names raise."""
    path, options = Path(path), options or RunOptions()
    for number, row in csv_rows(path, COLUMNS, BadRun):
        try:
            yield _cell(row, options)
        except _BadCell as error:
            raise BadRun(path, number, str(error)) from None


def by_engine(cells: Iterable[Cell]) -> dict[tuple[str, str, str, str], list[Cell]]:
    """Group cells by engine, model, dtype and devices, in order."""
    return grouped(
        cells, lambda cell: (cell.backend, cell.model, cell.dtype, f"{cell.tensor_parallel} × {cell.device}")
    )


class _BadCell(Exception):
    """The fault of a line, without its place."""


def _cell(row: dict[str, str], options: RunOptions) -> Cell:
    prompt, output, clients, degree = (
        _count(row, name) for name in ("input_tokens", "output_tokens", "concurrency", "tensor_parallel")
    )
    ttft, tpot = (_milliseconds(row, name) for name in ("ttft_ms", "tpot_ms"))
    if row["backend"] not in _ENGINES:
        raise _BadCell(f"backend is {row['backend']}; described are {', '.join(_ENGINES)}")
    if row["precision"] not in _PRECISIONS:
        raise _BadCell(f"precision is {row['precision']}; known are {', '.join(filter(None, _PRECISIONS))}")
    dtype = options.dtype or _PRECISIONS[row["precision"]]
    device = row["system"].split("_")[0]
    assumed = [] if row["precision"] or options.dtype else [f"precision is not stated: {dtype}"]
    if not row["version"]:
        assumed.append(f"version is not stated: as {_ENGINES[row['backend']]}")
    own = msgspec.structs.replace(
        options, device=options.device or device, dtype=dtype, engine=options.engine or _ENGINES[row["backend"]]
    )
    setup = prepared(RunSetup(model=row["model"], tensor_parallel=degree), own)
    step = setup.step
    roofline = step.roofline if isinstance(step, MeasuredStep) else step
    assumed += [*roofline.notes, *(f"not modelled: {each}" for each in roofline.model.not_modelled)]
    if setup.engine.reserved_rows:
        # An engine is set up for the concurrency that is measured on it.
        rows = max(1, clients - setup.engine.reserved_rows)
        setup = msgspec.structs.replace(setup, max_sequences=rows)
        assumed.append("the engine is set up for as many sequences as there are clients, and keeps one for itself")
    ttft_of, tpot_of = _simulated(setup, prompt, output, clients)
    return Cell(
        backend=row["backend"],
        model=row["model"],
        device=device,
        dtype=dtype,
        prompt_tokens=prompt,
        output_tokens=output,
        clients=clients,
        tensor_parallel=degree,
        ttft_s=ttft,
        tpot_s=tpot,
        simulated_ttft_s=ttft_of,
        simulated_tpot_s=tpot_of,
        assumed=tuple(assumed),
    )


def _simulated(setup: Prepared, prompt: int, output: int, clients: int) -> tuple[float, float]:
    """Simulate a closed loop. Return the mean seconds to first token, and for each token after it."""
    count = _ROUNDS * clients
    draws = np.random.default_rng(0)
    prompts, outputs = (
        np.maximum(1, np.round(length * draws.uniform(_SHORTEST, 1, count))).astype(np.int64)
        for length in (prompt, output)
    )
    trace = Trace.from_lengths(np.zeros(count), prompts, outputs)
    simulation = simulation_of(trace, setup, clients=clients)
    for _ in simulation.steps():
        pass
    latencies = simulation.latencies
    tpot = (latencies.last - latencies.first) / np.maximum(outputs - 1, 1)
    return float(latencies.ttft.mean()), float(tpot.mean())


def _count(row: dict[str, str], name: str) -> int:
    if not row[name].isdecimal() or not int(row[name]):
        raise _BadCell(f"{name} is {row[name]}; it has to be a whole number of at least 1")
    return int(row[name])


def _milliseconds(row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        raise _BadCell(f"{name} is {row[name]}; it has to be a number") from None
    if not 0.05 <= value <= 1e7:
        raise _BadCell(
            f"{name} is {value:g}; a step takes 0.05 ms at least and a request an hour at most: is it in another unit?"
        )
    return value / 1e3
