"""Requests on the engine by the wall clock: tokens/s, latencies, the cost of preemptions, and the distance from the machine's floor.

Each run has a new engine on the same model, so it begins with an empty cache and the same forecasts. The pool is written
once before the clock starts, so that every page exists.

The floor is the least time of a step: to read weights, K and V at memory's rate, or to compute its operations at the rate of matrix products,
whichever takes longer. Weights are read once a step. Of K and V no more is read than the blocks in use hold, since rows may share blocks. A model that
fits in a cache may be faster.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged import Batch
from paged.attention.kv_dtypes import AUTO
from paged.engine.engine import Engine
from paged.errors import BenchmarkFailed, InvalidConfig
from paged.model.limits import Limits, measured_limits
from paged.model.loading import LoadedModel
from paged.model.runner import is_small
from paged.model.shape import num_parameters, shape_of
from paged.model.threads import THREADS
from paged.study.hardware import Device, ModelShape, Roofline, StepWork
from paged.study.simulator.recording import add_request
from paged.study.simulator.result import Latencies, Percentiles
from paged.study.simulator.stretch import work_of
from paged.study.traces import Trace


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an engine beside its model."""

    num_blocks: int
    block_size: int = 16
    max_sequences: int = 128
    max_tokens_per_step: int = 2048
    backend: str = "auto"
    batch_invariant: bool = True
    kv_cache_dtype: str = AUTO

    def engine(self, model: LoadedModel) -> Engine:
        """Make an engine, and write every page of its pool once. Raises as Engine does."""
        engine = Engine(model, **msgspec.structs.asdict(self))
        engine.pool.pages.on_device.zero_()
        return engine


class EngineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Seconds of the wall clock, from the first request's arrival to the last token.

    ttft_s, itl_s           time to first token of each request; all times between two tokens of a request
    computed_prompt_tokens  prompt tokens that no prefix hit gave, without recomputed_tokens
    floor_s                 the least that the steps could have taken on this machine; None if the model's shape is not known
    times_floor             seconds over floor_s
    """

    seconds: float
    steps: int
    output_tokens: int
    tokens_per_s: float
    ttft_s: Percentiles
    itl_s: Percentiles
    computed_prompt_tokens: int
    recomputed_tokens: int
    preemptions: int
    floor_s: float | None
    times_floor: float | None


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a workload on a model.

    applied  the changes to the trace, a sentence each
    limits   this machine's rates, from which the floor follows
    """

    model: str
    parameters: int
    dtype: str
    backend: str
    serving: Serving
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    applied: tuple[str, ...]
    limits: Limits
    runs: tuple[EngineRun, ...]


def precision_of(engine: Engine) -> str:
    """Return the dtypes of an engine's model, weights, K and V, such as "bfloat16, weights in int4, K and V in int8"."""
    kept = engine.pool.kv_dtype
    return engine.model.precision if kept == AUTO else f"{engine.model.precision}, K and V in {kept}"


class EngineBench:
    """Repeated runs of one trace on new engines of one model.

    rate  factor on the trace's arrival rate; None: all requests come at once

    Raises InvalidConfig for a pool that cannot hold the largest request, and what Engine raises.
    """

    def __init__(self, model: LoadedModel, trace: Trace, serving: Serving, *, rate: float | None = None) -> None:
        check_pool(trace, serving.num_blocks, serving.block_size)
        self._model, self._trace, self._serving, self._rate = model, trace, serving, rate
        # Made here, so that it raises before anything is measured; it serves the first run.
        self._engine: Engine | None = serving.engine(model)
        self._backend, self._precision = self._engine.runner.backend.name, precision_of(self._engine)
        with THREADS.at_most(1 if is_small(model) else torch.get_num_threads()):
            self._limits = measured_limits(model.dtype)
        shape = shape_of(model)
        stored = {"quantization": model.quantization, "quantize_head": model.quantize_head}
        its: Any = {"kv_dtype": self._engine.pool.kv_dtype, **stored}
        self._floor = None if shape is None else Floor(shape, self._limits, **its)

    def run(self) -> EngineRun:
        """Serve the trace once. Raises as `engine_run` does."""
        engine, self._engine = self._engine or self._serving.engine(self._model), None
        return engine_run(engine, self._trace, floor=self._floor, rate=self._rate)

    def times(self, runs: Sequence[EngineRun], *, model: str, workload: str) -> EngineTimes:
        """Return these runs under the names of model and workload."""
        trace = self._trace
        return EngineTimes(
            model=model,
            parameters=num_parameters(self._model),
            dtype=self._precision,
            backend=self._backend,
            serving=self._serving,
            workload=workload,
            requests=len(trace),
            prompt_tokens=int(trace.prompt_tokens.sum()),
            output_tokens=int(trace.output_tokens.sum()),
            applied=tuple(map(str, trace.applied)),
            limits=self._limits,
            runs=tuple(runs),
        )


def blocks_wanted(trace: Trace, block_size: int, max_sequences: int) -> int:
    """Return the blocks of the `max_sequences` longest requests at their full length, as if they shared nothing."""
    return int(np.sort(_blocks_of_each(trace, block_size))[-max_sequences:].sum())


def check_pool(trace: Trace, num_blocks: int, block_size: int) -> None:
    """Raise InvalidConfig for a pool that cannot hold the largest request."""
    needed = int(_blocks_of_each(trace, block_size).max())
    if num_blocks < needed:
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        raise InvalidConfig(
            f"the pool has {num_blocks:,} blocks of {block_size:,} tokens; the largest request has {longest:,} tokens and needs {needed:,}"
        )


def _blocks_of_each(trace: Trace, block_size: int) -> NDArray[np.int64]:
    return -(-(trace.prompt_tokens + trace.output_tokens) // block_size)


def engine_run(
    engine: Engine,
    trace: Trace,
    *,
    floor: "Floor | None" = None,
    rate: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineRun:
    """Serve a trace on a new engine. Each request gets as many tokens as the trace has for it; `rate` as in EngineBench.

    Raises InvalidConfig for an engine that has been used, BenchmarkFailed, and what the engine raises.
    """
    if engine.scheduler.counts()["submitted"]:
        raise InvalidConfig("the engine has had requests; a run begins with a new one")
    arrivals = np.zeros(len(trace)) if rate is None else trace.arrival_s / rate
    vocabulary = np.int32(engine.model.vocabulary_size)
    prompts = [(trace.prompt(number) % vocabulary).tolist() for number in range(len(trace))]
    # When each batch ended, and the blocks in use then. The figures are computed after the run.
    ended: list[tuple[float, Batch, int]] = []
    engine.on_batch = lambda batch: ended.append((clock(), batch, engine.manager.device.num_used))
    num_added = num_told = 0
    began = clock()
    while num_added < len(trace) or engine.has_unfinished:
        now = clock() - began
        while num_added < len(trace) and arrivals[num_added] <= now:
            add_request(engine, trace, num_added, prompts[num_added])
            num_added += 1
        if engine.has_unfinished:
            num_told += sum(len(output.token_ids) for output in engine.step())
        else:
            time.sleep(max(0.0, arrivals[num_added] - now))
    wanted = int(trace.output_tokens.sum())
    if num_told != wanted:
        raise BenchmarkFailed(f"{num_told:,} tokens came; the requests want {wanted:,}")
    return _figures(engine, trace, arrivals, began, ended, floor)


def _figures(
    engine: Engine,
    trace: Trace,
    arrivals: NDArray[np.float64],
    began: float,
    ended: Sequence[tuple[float, Batch, int]],
    floor: "Floor | None",
) -> EngineRun:
    block_size, latencies = engine.manager.block_size, Latencies(len(trace))
    for number, arrival in enumerate(arrivals.tolist()):
        latencies.arrived(number, arrival)
    for at, batch, _ in ended:
        latencies.tokens(batch.ids[batch.samples].astype(np.int64), at - began)
    seconds, found = latencies.last_token_s, latencies.percentiles()
    # Blocks of requests that end with a batch are free when the batch is noted; they were in use at the batch before.
    used = np.array([0, *(num_used for _, _, num_used in ended)])
    used_slots = np.maximum(used[:-1], used[1:]) * block_size
    work = [work_of(batch, block_size) for _, batch, _ in ended]
    floor_s = None if floor is None else floor.seconds(work, used_slots.tolist())
    stats, num_tokens = engine.scheduler.stats(), int(trace.output_tokens.sum())
    return EngineRun(
        seconds=seconds,
        steps=stats.steps,
        output_tokens=num_tokens,
        tokens_per_s=num_tokens / seconds,
        ttft_s=found["ttft_s"],
        itl_s=found["itl_s"],
        # The last token of a request is not computed.
        computed_prompt_tokens=stats.computed_tokens - stats.recomputed_tokens - (num_tokens - len(trace)),
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        floor_s=floor_s,
        times_floor=None if floor_s is None else seconds / floor_s,
    )


# As paged.study.hardware calls what torch calls so.
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Floor:
    """A model on this machine, with an engine's `kv_cache_dtype` (`kv_dtype`), `quantization` and `quantize_head`. Operations are counted at the rate of
    products in the dtype; products of codes may be faster."""

    def __init__(
        self,
        shape: ModelShape,
        limits: Limits,
        *,
        kv_dtype: str = AUTO,
        quantization: str | None = None,
        quantize_head: bool = False,
    ) -> None:
        dtype = _DTYPES[limits.dtype]
        here = Device(
            name="this machine",
            memory_bytes=1,
            bandwidth=limits.read_bytes_per_s,
            peak_flops={dtype: limits.flops_per_s},
            host_link=limits.read_bytes_per_s,
        )
        self._limits = limits
        self._roofline = Roofline(
            model=shape,
            device=here,
            dtype=dtype,
            kv_dtype=None if kv_dtype == AUTO else kv_dtype,
            quantization=quantization,
            quantize_head=quantize_head,
        )

    def seconds(self, steps: Sequence[StepWork], used_slots: Sequence[int]) -> float:
        """Return the least seconds of all steps together. `used_slots`: slots of the blocks in use at each step, with or without those of its own
        tokens."""
        work = StepWork.of_steps(steps)
        most = np.asarray(used_slots) + work.computed_tokens
        read = msgspec.structs.replace(work, context_tokens=np.minimum(work.context_tokens, most))
        carried = self._roofline.kept_bytes(read) / self._limits.read_bytes_per_s
        computed = self._roofline.flops(work) / self._limits.flops_per_s
        return float(np.maximum(carried, computed).sum())
