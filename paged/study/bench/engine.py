"""Requests on the engine by the wall clock: tokens/s, latencies, the cost of preemptions, and the distance from the machine's floor.

Each run has a new engine on the same model, so it begins with an empty cache and the same forecasts. The pool is written
once before the clock starts, so that every page exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged import Batch, SamplingParams
from paged.attention.kv_dtypes import AUTO
from paged.engine.engine import Engine
from paged.errors import BenchmarkFailed, InvalidConfig
from paged.model.limits import Limits, measured_limits
from paged.model.loading import LoadedModel
from paged.model.runner import is_small
from paged.model.shape import num_parameters, shape_of
from paged.model.threads import THREADS
from paged.study.bench.floor import Floor
from paged.study.simulator.latencies import Latencies
from paged.study.simulator.result import Percentiles
from paged.study.simulator.work import work_of
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
    floor: Floor | None = None,
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
    watch = _Watch(engine, clock)
    engine.on_batch = watch.note
    num_added = num_told = 0
    began = clock()
    while num_added < len(trace) or engine.has_unfinished:
        now = clock() - began
        while num_added < len(trace) and arrivals[num_added] <= now:
            engine.add_request(
                prompts[num_added],
                SamplingParams(max_tokens=int(trace.output_tokens[num_added]), ignore_eos=True),
                id=str(num_added),
                priority=int(trace.priority[num_added]),
                salt=str(trace.tenant[num_added]) or None,
                tenant=str(trace.tenant[num_added]) or None,
            )
            num_added += 1
        if engine.has_unfinished:
            num_told += sum(len(output.token_ids) for output in engine.step())
        else:
            time.sleep(max(0.0, arrivals[num_added] - now))
    wanted = int(trace.output_tokens.sum())
    if num_told != wanted:
        raise BenchmarkFailed(f"{num_told:,} tokens came; the requests want {wanted:,}")
    return watch.run(trace, arrivals, began, floor)


class _Watch:
    """When each batch ended. The figures are computed after the run."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._ended: list[tuple[float, Batch, int]] = []

    def note(self, batch: Batch) -> None:
        """Note that the batch ends now."""
        self._ended.append((self._clock(), batch, self._engine.manager.device.num_used))

    def run(self, trace: Trace, arrivals: NDArray[np.float64], began: float, floor: Floor | None) -> EngineRun:
        """Return the figures of the run."""
        engine, block_size = self._engine, self._engine.manager.block_size
        latencies = Latencies(len(trace))
        for number, arrival in enumerate(arrivals.tolist()):
            latencies.arrived(number, arrival)
        for ended, batch, _ in self._ended:
            latencies.tokens(batch.ids[batch.samples].astype(np.int64), ended - began)
        seconds, found = latencies.last_token_s, latencies.percentiles()
        # Blocks of requests that end with a batch are free when the batch is noted; they were in use at the batch before.
        used = np.array([0, *(num_used for _, _, num_used in self._ended)])
        used_slots = np.maximum(used[:-1], used[1:]) * block_size
        work = [work_of(batch, block_size) for _, batch, _ in self._ended]
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
