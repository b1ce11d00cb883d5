"""A recorded run against its simulation: latencies, and running sequences and memory in use over time.

    TTFT   taken in to first token        TPOT   first to last token ÷ tokens after the first
    E2E    taken in to last token         makespan   first taken in to last token of all

Percentiles are interpolated, as in published runs. Errors are signed: above 0 the simulation is too long.
"""

import re
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import POLICIES, BlockManager, Policy, Scheduler
from paged.base.fields import AtLeast1
from paged.errors import InvalidConfig, UnknownEngine
from paged.model.model_shape import ModelShape
from paged.study.files import named_in, names_in, read_described
from paged.study.hardware import KV_DTYPES, Roofline, device_named, device_names, model_named, usual_dtype
from paged.study.hardware.device import link_of
from paged.study.hardware.measured import step_of, timed_by
from paged.study.hardware.measured_step import Launching, MeasuredStep
from paged.study.limits import check
from paged.study.simulator.recorded_run import RecordedRun, RunSetup, Series
from paged.study.simulator.replicas import Replicas, Routing
from paged.study.traces import Trace

Times = NDArray[np.float64]
STATISTICS = ("mean", "p50", "p90", "p99")
METRICS = ("makespan", "ttft", "tpot", "e2e")


class Figures(msgspec.Struct, frozen=True):
    """Seconds of a metric; a makespan has the same value in all four."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Times) -> "Figures":
        """Return the figures of at least one value."""
        return cls(float(values.mean()), *(float(each) for each in np.percentile(values, (50, 90, 99))))


class SeriesError(msgspec.Struct, frozen=True):
    """Differences over the ticks, absolute and signed (`_mean`): `running` as a share of the measured mean, `kv_points` in points of KV."""

    running: float
    running_mean: float
    kv_points: float | None
    kv_points_mean: float | None


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """A run, its simulation, and the errors.

    assumed   what the run does not state, a sentence each
    errors    by metric and statistic, signed shares of the measured
    series    measured and simulated at the run's ticks, if it has any
    """

    run: str
    engine: str
    cost_model: str
    assumed: tuple[str, ...]
    measured: dict[str, Figures]
    simulated: dict[str, Figures]
    errors: dict[str, dict[str, float]]
    preemptions: int
    series_error: SeriesError | None = None
    series: dict[str, list[float]] = {}


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's options for a run; None: as the run states, or as the engine has it."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: str | None = None
    quantize_head: bool = False
    engine: str | None = None
    blocks: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    link_gbps: float | None = None
    link_us: float | None = None
    published: bool = False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A run's setup, complete: the engine with what the run states of it, its cost model, and its blocks on each of the data-parallel ranks."""

    engine: "EngineDescription"
    step: MeasuredStep | Roofline
    cost_model: str
    blocks: int
    assumed: tuple[str, ...]
    data_parallel: int = 1


def prepared(
    setup: RunSetup, options: RunOptions, *, name: str | None = None, engine: "EngineDescription | None" = None
) -> Prepared:
    """Complete a run's setup by the caller's options and assumptions. The device may be in the run's `name`; `engine` replaces an engine known by name.
    Raises InvalidConfig if neither states model or device, and what names raise."""
    assumed = list[str]()
    engine = engine or engine_named(options.engine or _engine_of(setup.engine_version, assumed))
    if setup.refused:
        raise InvalidConfig(
            f"the run has {'; '.join(setup.refused)}, which changes what is simulated and is not modelled"
        )
    stated = {name: getattr(setup, name) for name in set(setup.__struct_fields__) & set(engine.__struct_fields__)}
    engine = msgspec.structs.replace(engine, **{name: value for name, value in stated.items() if value is not None})
    model = options.model or setup.model
    device = options.device or _device_of(setup.device_name, name, assumed)
    if model is None or device is None:
        what = "model" if model is None else "device"
        raise InvalidConfig(f"the run does not say its {what}; --{what} does")
    shape, placed = model_named(model), device_named(device)
    if shape.mixers:
        raise InvalidConfig(
            f"{shape.name} has layers that keep a state; how a recorded engine keeps one is not modelled"
        )
    _check_quantization(setup.quantization, shape, options)
    # A checkpoint in 8 bits stays so, whatever dtype its activations have.
    is_quantised = shape.dtype is not None and usual_dtype(shape, placed) == shape.dtype
    dtype = options.dtype or (usual_dtype(shape, placed) if is_quantised else _dtype_of(setup.dtype, assumed))
    kv_dtype = options.kv_dtype or _kv_dtype_of(setup.kv_dtype)
    degree = options.tensor_parallel or setup.tensor_parallel
    ranks = options.data_parallel or setup.data_parallel
    roofline = Roofline(
        model=shape,
        device=placed,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=options.quantization,
        quantize_head=options.quantize_head,
        tensor_parallel=degree,
        data_parallel=ranks,
        link=link_of(placed, options.link_gbps, options.link_us),
        host_overhead_s=engine.launching.host_s,
    )
    assumed += [*roofline.notes, *(f"not modelled: {each}" for each in shape.not_modelled)]
    step = step_of(roofline, launching=engine.launching, published=options.published)
    if isinstance(step, MeasuredStep):
        assumed += step.layers.notes
    assumed += [*_of_ranks(roofline), *setup.not_modelled]
    counted = setup.num_blocks if options.blocks is None else options.blocks
    if shape.kept:
        assumed.append(
            "memory keeps all tokens of every layer, also of those that read a window or a chunk of them alone"
        )
    if counted is None:
        whole = msgspec.structs.replace(roofline, model=msgspec.structs.replace(shape, kept=()))
        blocks = whole.num_blocks(
            engine.block_size,
            engine.memory_share,
            max_tokens_per_step=engine.max_tokens_per_step,
            max_sequences=engine.max_sequences,
        )
        assumed.append(f"the run does not say how many blocks it had: {blocks:,} fit beside the weights")
    else:
        blocks = counted - engine.reserved_blocks
    return Prepared(
        engine=engine,
        step=step,
        cost_model=timed_by(step, published=options.published),
        blocks=blocks,
        assumed=tuple(assumed),
        data_parallel=ranks,
    )


def simulation_of(trace: Trace, setup: Prepared, *, clients: int | None = None) -> Replicas:
    """Make the simulation of a trace under a run's setup. Raises InvalidConfig."""
    engine = setup.engine
    schedulers = [
        Scheduler(
            BlockManager(setup.blocks, engine.block_size, prefix_caching=engine.prefix_caching),
            policy=engine.own_policy(),
            max_tokens_per_step=engine.max_tokens_per_step,
            max_sequences=engine.max_sequences,
            costs=setup.step.costs(engine.block_size),
        )
        for _ in range(setup.data_parallel)
    ]
    routing = Routing(replicas=setup.data_parallel, router="least-loaded")
    return Replicas(trace, schedulers, setup.step, routing, runs_ahead=engine.runs_ahead, clients=clients)


def _of_ranks(roofline: Roofline) -> list[str]:
    """Return the assumptions on data-parallel ranks, a sentence each."""
    if roofline.data_parallel == 1:
        return []
    said = ["a request goes to the rank with the least to do when it comes, one that waits counted as four that run"]
    if roofline.is_lockstep:
        said.append(
            "ranks share the experts and step together, each layer with an all-gather and a reduce-scatter over all ranks' tokens; that the "
            "host agrees with the other ranks on a step's size takes no time here"
        )
    return said


def validated(
    run: RecordedRun, options: RunOptions | None = None, *, engine: "EngineDescription | None" = None
) -> Validation:
    """Simulate the run from its arrivals and lengths alone. Raises what `prepared` raises, and InvalidConfig if no request fits."""
    setup = prepared(run.setup, options or RunOptions(), name=run.name, engine=engine)
    trace = Trace.from_lengths(run.arrival, run.prompt_tokens, run.output_tokens, name=run.name)
    simulation = simulation_of(trace, setup, clients=run.clients)
    simulation.run()
    latencies = simulation.latencies
    first, last = latencies.first, latencies.last
    served = ~np.isnan(first)
    if not served.any():
        raise InvalidConfig(
            f"none of the run's {len(served):,} requests fits into {setup.blocks:,} blocks of {setup.engine.block_size}"
        )
    if run.clients is not None:
        queued = first - latencies.ttft
    else:
        # A run without times of being taken in counts from arrivals.
        queued = run.arrival if (run.queued == run.arrival).all() else taken_in(run.arrival, simulation)
    assumed = setup.assumed
    if not served.all():
        assumed += (
            f"{int((~served).sum()):,} requests do not fit into {setup.blocks:,} blocks and are left out of both",
        )
    measured = _figures(run.queued[served], run.first[served], run.last[served], run.output_tokens[served])
    simulated = _figures(queued[served], first[served], last[served], run.output_tokens[served])
    errors = {
        metric: {name: _off(getattr(simulated[metric], name), getattr(measured[metric], name)) for name in STATISTICS}
        for metric in METRICS
    }
    error, series = None, dict[str, list[float]]()
    if run.series is not None:
        error, series = _series_error(run.series, simulation, setup.blocks)
    return Validation(
        run=run.name,
        engine=setup.engine.name,
        cost_model=setup.cost_model,
        assumed=assumed,
        measured=measured,
        simulated=simulated,
        errors=errors,
        preemptions=sum(rank.scheduler.stats().preemptions_recompute for rank in simulation.ranks),
        series_error=error,
        series=series,
    )


def _off(simulated: float, measured: float) -> float:
    """Return the error as a signed share of the measured; if that is 0, 0 or infinite."""
    if measured == 0:
        return 0.0 if simulated == 0 else np.inf
    return simulated / measured - 1


def _figures(queued: Times, first: Times, last: Times, output_tokens: NDArray[np.int64]) -> dict[str, Figures]:
    makespan = np.array([last.max() - queued.min()])
    has_more = output_tokens > 1
    tpot = (last - first)[has_more] / (output_tokens[has_more] - 1) if has_more.any() else np.array([np.nan])
    return {
        "makespan": Figures.of(makespan),
        "ttft": Figures.of(first - queued),
        "tpot": Figures.of(tpot),
        "e2e": Figures.of(last - queued),
    }


def taken_in(arrival: Times, simulation: Replicas) -> Times:
    """Return when the simulated engine takes requests in: at once if nothing runs, else at the end of the running step."""
    found = arrival.copy()
    for number, rank in enumerate(simulation.ranks):
        columns, own = rank.timeline.columns(), simulation.replica_of == number
        ends = columns["end_s"]
        if not len(ends):
            continue
        place = np.minimum(np.searchsorted(ends, arrival[own], "left"), len(ends) - 1)
        does_run = ends[place] - columns["seconds"][place] <= arrival[own]
        found[own] = np.where(does_run, np.maximum(ends[place], arrival[own]), arrival[own])
    return found


def _series_error(series: Series, simulation: Replicas, blocks: int) -> tuple[SeriesError, dict[str, list[float]]]:
    running, waiting, held = (np.zeros(len(series.t)) for _ in range(3))
    ranks = simulation.ranks
    for rank in ranks:
        columns = rank.timeline.columns()
        ends = columns["end_s"]
        if not len(ends):
            continue
        # An engine logs the state at its latest step.
        place = np.minimum(np.searchsorted(ends, series.t, "left"), len(ends) - 1)
        goes_on = series.t <= ends[-1]
        running += np.where(goes_on, columns["rows"][place], 0.0)
        waiting += np.where(goes_on, columns["waiting"][place], 0.0)
        held += np.where(goes_on, columns["held"][place], 0.0)
    usage = held / (blocks * ranks[0].scheduler.manager.block_size * len(ranks))
    knows_kv = bool((series.kv_usage > 0).any())
    level = float(series.running.mean()) or 1.0
    error = SeriesError(
        running=float(np.abs(running - series.running).mean()) / level,
        running_mean=float((running - series.running).mean()) / level,
        kv_points=100 * float(np.abs(usage - series.kv_usage).mean()) if knows_kv else None,
        kv_points_mean=100 * float((usage - series.kv_usage).mean()) if knows_kv else None,
    )
    pairs = {
        "running": (series.running, running),
        "waiting": (series.waiting, waiting),
        "kv_usage": (series.kv_usage, usage),
    }
    found = {"t": series.t.tolist()}
    for name, (measured, simulated) in pairs.items():
        if name != "kv_usage" or knows_kv:
            found |= {f"{name}_measured": measured.tolist(), f"{name}_simulated": simulated.tolist()}
    return error, found


def _engine_of(version: str | None, assumed: list[str]) -> str:
    """Return the described engine nearest to a version of vLLM: the last one not above it."""
    known = [name for name in engine_names() if name.startswith("vllm-")]
    found = re.match(r"v?(\d+)\.(\d+)", version or "")
    if found is None:
        assumed.append(f"the run does not say its engine: {known[-1]}")
        return known[-1]
    numbers = tuple(map(int, found.groups()))
    older = [name for name in known if _numbers(name) <= numbers]
    nearest = max(older or known[:1], key=_numbers)
    if _numbers(nearest) != numbers:
        assumed.append(f"vLLM {version} is not described: {nearest}")
    return nearest


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.removeprefix("vllm-").split(".")))


def _device_of(device_name: str | None, run_name: str | None, assumed: list[str]) -> str | None:
    """Return the device with the longest name that is in the driver's name of it, or in the run's name."""
    for said, is_own in ((device_name, True), (run_name, False)):
        squeezed = re.sub(r"[^a-z0-9]", "", (said or "").lower())
        for name in sorted(device_names(), key=len, reverse=True):
            if name.replace("-", "") in squeezed:
                if not is_own:
                    assumed.append(f"the run does not say its device: {name}, by the run's name")
                return name
    return None


def _check_quantization(found: str | None, shape: ModelShape, options: RunOptions) -> None:
    """Raise InvalidConfig for a format of weights unless the model is published in it or an option says how to count them."""
    if found is None or options.dtype or options.quantization:
        return
    stored = shape.dtype or (shape.codes.title if shape.codes and shape.codes.bits else "")
    if not stored.lower().startswith(found.removesuffix("_marlin")):
        raise InvalidConfig(
            f"the run has quantization = {found!r}, and {shape.name} is not known to be stored so; --quantization or --dtype says how to count "
            "its weights, or --model names a folder that is"
        )


def _kv_dtype_of(dtype: str | None) -> str | None:
    """Return our name of a run's dtype of K and V; None: the default. Raises InvalidConfig for an unknown one."""
    if dtype is None or dtype == "auto":
        return None
    known = {"bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int8_per_token_head": "int8"}
    if known.get(dtype, dtype) not in KV_DTYPES:
        raise InvalidConfig(f"the run keeps K and V in {dtype}, which is not modelled; --kv-dtype says what to count")
    return known.get(dtype, dtype)


def _dtype_of(dtype: str | None, assumed: list[str]) -> str:
    dtype = (dtype or "None").removeprefix("torch.")
    known = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}
    if dtype in known:
        return known[dtype]
    assumed.append(f"the run says dtype {dtype}: bf16")
    return "bf16"


_FOLDER = Path(__file__).parent / "engines"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults of a run of this engine.

    policy, watermark    its policy here, and the share of blocks that it keeps free when it admits
    memory_share         of the device's memory that it takes
    reserved_blocks      blocks of its count that hold no tokens (vLLM's null block)
    reserved_rows        sequences of its setup that it does not serve
    runs_ahead           it decides a step while the one before runs
    launching            what it adds to the kernels of a step
    source               of the figures, and what some were fitted to
    """

    name: str
    policy: str
    watermark: float = 0.0
    max_tokens_per_step: AtLeast1
    max_sequences: AtLeast1
    block_size: AtLeast1 = 16
    prefix_caching: bool = True
    memory_share: float = 0.9
    reserved_blocks: int = 0
    reserved_rows: int = 0
    runs_ahead: bool = False
    launching: Launching = Launching()
    source: str = ""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidConfig(f"policy is {self.policy}; known are {', '.join(POLICIES)}")
        check(self)

    def own_policy(self) -> Policy:
        """Return the policy with this engine's watermark."""
        return msgspec.structs.replace(POLICIES[self.policy], watermark=self.watermark)


def engine_names() -> list[str]:
    """Return the names of the described engines, sorted."""
    return names_in(_FOLDER)


@cache
def engine_named(name: str) -> EngineDescription:
    """Return the engine of that name, or the one in a file if the name ends in .json.

    Raises UnknownEngine, BadHardwareFile for a file that does not describe an engine, and OSError for a file that cannot be read.
    """
    return named_in(_FOLDER, name, lambda path: read_described(path, EngineDescription), UnknownEngine)
