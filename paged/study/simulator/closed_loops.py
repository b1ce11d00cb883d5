"""Measured closed loops against their simulation: a table with a line for each model, engine, device and concurrency.

    backend, version, model, system, precision, input_tokens, output_tokens, concurrency, tensor_parallel, ttft_ms, tpot_ms

ttft_ms and tpot_ms are means over the requests of a run. As many clients as `concurrency` each send their next request, of
about one length, when their last one has ended.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from paged.base.fields import AtLeast1
from paged.study.files import csv_lines
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.simulator.recorded_run import RunSetup, bad_run
from paged.study.simulator.study import grouped
from paged.study.simulator.validation import Prepared, RunOptions, prepared, simulation_of
from paged.study.traces import Trace

_ROUNDS, _SHORTEST = 10, 0.8
"""Requests of each client, and the shortest length as a share of the named one. The tables do not say, so these are what serving benchmarks commonly
do. With one exact length, clients would stay together, and all prompts would come at once."""
# A step takes 0.05 ms at least, and a request an hour at most: another time is in another unit.
_Milliseconds = Annotated[float, Meta(ge=0.05, le=1e7)]
_ENGINES = {"vllm": "vllm-0.24", "trtllm": "tensorrt-llm-1.0"}
_PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "fp8": "fp8", "float16": "fp16", "fp16": "fp16"}


class _Row(msgspec.Struct, kw_only=True):
    """A line of the table."""

    backend: Literal["vllm", "trtllm"]
    version: str = ""
    model: str
    system: str
    precision: Literal["bfloat16", "bf16", "fp8", "float16", "fp16"] | None = None
    input_tokens: AtLeast1
    output_tokens: AtLeast1
    concurrency: AtLeast1
    tensor_parallel: AtLeast1
    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds


COLUMNS = _Row.__struct_fields__


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
    for line in csv_lines(Path(path), bad_run, COLUMNS):
        yield _cell(line.read(_Row), options or RunOptions())


def by_engine(cells: Iterable[Cell]) -> dict[tuple[str, str, str, str], list[Cell]]:
    """Group cells by engine, model, dtype and devices, in order."""
    return grouped(
        cells, lambda cell: (cell.backend, cell.model, cell.dtype, f"{cell.tensor_parallel} × {cell.device}")
    )


def _cell(row: _Row, options: RunOptions) -> Cell:
    dtype = options.dtype or _PRECISIONS[row.precision or "bf16"]
    device = row.system.split("_")[0]
    assumed = [] if row.precision or options.dtype else [f"precision is not stated: {dtype}"]
    if not row.version:
        assumed.append(f"version is not stated: as {_ENGINES[row.backend]}")
    own = msgspec.structs.replace(
        options, device=options.device or device, dtype=dtype, engine=options.engine or _ENGINES[row.backend]
    )
    setup = prepared(RunSetup(model=row.model, tensor_parallel=row.tensor_parallel), own)
    step = setup.step
    roofline = step.roofline if isinstance(step, MeasuredStep) else step
    assumed += [*roofline.notes, *(f"not modelled: {each}" for each in roofline.model.not_modelled)]
    if setup.engine.reserved_rows:
        # An engine is set up for the concurrency that is measured on it.
        rows = max(1, row.concurrency - setup.engine.reserved_rows)
        setup = msgspec.structs.replace(setup, engine=msgspec.structs.replace(setup.engine, max_sequences=rows))
        assumed.append("the engine is set up for as many sequences as there are clients, and keeps one for itself")
    ttft_of, tpot_of = _simulated(setup, row.input_tokens, row.output_tokens, row.concurrency)
    return Cell(
        backend=row.backend,
        model=row.model,
        device=device,
        dtype=dtype,
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        clients=row.concurrency,
        tensor_parallel=row.tensor_parallel,
        ttft_s=row.ttft_ms / 1e3,
        tpot_s=row.tpot_ms / 1e3,
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
    simulation.run()
    latencies = simulation.latencies
    tpot = (latencies.last - latencies.first) / np.maximum(outputs - 1, 1)
    return float(latencies.ttft.mean()), float(tpot.mean())
