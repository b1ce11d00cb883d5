"""`paged bench`: the scheduler, attention, the engine and its steps, timed on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, islice, product
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from paged.attention.kv_dtypes import AUTO, KV_DTYPES
from paged.base.budget import short
from paged.base.extras import import_with_extra
from paged.base.words import counted
from paged.cli.commands import group_of, with_options_of
from paged.cli.models import ModelOptions
from paged.cli.options import Json, count, listed
from paged.cli.show import all_of, counting, figures, loading, print_json, say, table
from paged.errors import InvalidConfig
from paged.study.bench import DecodeStep, decode_step
from paged.study.bench.workloads import WORKLOADS, Measured, workload as made_workload

if TYPE_CHECKING:
    from paged.study.bench.attention import AttentionTimes, Load
    from paged.study.bench.engine import EngineRun, EngineTimes
    from paged.study.bench.step import StepParts

_CACHING = {"off": [False], "on": [True], "both": [False, True]}
_MOST_NEW = 256
_STEPS = ("decode", "prefill", "mixed")
_COMPUTED = "What is computed"
_REQUESTS, _MEMORY, _TIMING = "The requests", "Memory and steps", "How it is timed"
_WORKLOAD_HELP = (
    f"{', '.join(WORKLOADS)}, or a trace as `paged simulate` takes: a file, an excerpt's name, `synthetic:…`. offline: 64 requests of log-normal "
    "lengths, about 160 tokens in and 96 out; shared_prefix: 64 of 4 families that share 512 tokens each; single: one, 128 in and 128 out."
)


def scheduler(
    rows: Annotated[str, Option(help="Decoding sequences, one number or several with commas.")] = "64,256,1024,4096",
    context: Annotated[int, Option(min=1, help="Prompt tokens of each sequence.")] = 256,
    holes: Annotated[int, Option(min=0, help="Sequences that are aborted before timing, for free rows among the live ones.")] = 0,
    caching: Annotated[Literal["on", "off", "both"], Option(help="Prefix caching.")] = "both",
    steps: Annotated[int | None, Option(min=16, help="Steps to time.", show_default="2^18 / rows, 160 to 2048")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Time one decode step of the scheduler: schedule and update, in CPU time, with no model behind it.

    All sequences decode one token a step. The figure is the median over windows of 16 steps of the mean step, because sequences that started
    together need a new block once in 16 steps. Making the sampled tokens is the model's part and not timed.

    Example: `paged bench scheduler --rows 1024 --holes 16 --caching on`
    """
    cases = [(num, is_on) for num in listed(rows, "--rows", count) for is_on in _CACHING[caching]]
    measured = (decode_step(num, caching=is_on, context=context, holes=holes, steps=steps) for num, is_on in cases)
    show = partial(_show_scheduler, context=context, holes=holes, json=json)
    show(all_of(measured, len(cases), "measurement", show))


def _show_scheduler(results: list[DecodeStep], context: int, holes: int, json: bool) -> None:
    if json:
        print_json(results)
    else:
        title = f"a decode step, µs of CPU time; prompts of {context:,} tokens, {holes} holes"
        columns = ["rows", "caching", "µs a step", "fastest window", "slowest window", "schedule", "update", "µs a row"]
        table(title, columns, [_scheduler_cells(result) for result in results], right=(0, 2, 3, 4, 5, 6, 7))


def _scheduler_cells(result: DecodeStep) -> list[str]:
    micros = [result.us_per_step, result.us_min, result.us_max, result.us_schedule, result.us_update]
    return [
        f"{result.rows:,}",
        "on" if result.caching else "off",
        *(f"{value:,.1f}" for value in micros),
        f"{result.us_per_row:.3f}",
    ]


def attention(
    backends: Annotated[str | None, Option(help="Backends, with commas between: native, torch_gather, reference.", show_default="all that can run here; reference is too slow to wait for")] = None,
    shapes: Annotated[str, Option(metavar="HEADS/KV/SIZE[,…]", help="Query heads, heads of K and V, size of a head.", rich_help_panel=_COMPUTED)] = "9/3/64,14/2/64,32/8/128",
    block_sizes: Annotated[str, Option(metavar="N[,…]", help="Tokens a block.", rich_help_panel=_COMPUTED)] = "16,64",
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Dtype of queries, K and V.", rich_help_panel=_COMPUTED)] = "float32",
    kv_cache_dtype: Annotated[str, Option(help="Storage of K and V: auto, as --dtype; int8 or int4.", rich_help_panel=_COMPUTED)] = AUTO,
    sequences: Annotated[int, Option(min=1, help="Sequences of a decode.", rich_help_panel=_COMPUTED)] = 64,
    context: Annotated[int, Option(min=1, help="Tokens of each sequence.", rich_help_panel=_COMPUTED)] = 512,
    prompt: Annotated[int | None, Option(min=1, help="New tokens among these: for each of 4 sequences in a prefill, for one in a mixed step.", show_default="256, or all", rich_help_panel=_COMPUTED)] = None,
    fast: Annotated[bool, Option("--fast", help="Run backends in the mode in which answers may depend on the batch.")] = False,
    rounds: Annotated[int, Option(min=1, help="Rounds of timing.", rich_help_panel=_TIMING)] = 7,
    threads: Annotated[int | None, Option(min=1, help="Torch's threads.", show_default="torch's own choice", rich_help_panel=_TIMING)] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Time one layer's attention by every backend that runs here: a decode, a prefill, and a step that mixes both.

    Blocks lie in random order in a pool larger than a processor's cache. A decode is shown in bytes of K and V a second, and their share of
    what a copy reads and writes here; a prefill in operations a second. Backends take turns; a figure is the median of its rounds.

    Example: `paged bench attention --shapes 9/3/64 --block-sizes 16 --dtype bfloat16`
    """
    if kv_cache_dtype not in KV_DTYPES:
        raise InvalidConfig(f'--kv-cache-dtype is "{kv_cache_dtype}"; it takes {", ".join(KV_DTYPES)}')
    pairs = [_numbers_of_heads(part) for part in shapes.split(",")]
    sizes = listed(block_sizes, "--block-sizes", count)
    names = None if backends is None else [name.strip() for name in backends.split(",")]
    with loading("torch and the backends"):
        torch = import_with_extra("torch", "bench")
        from paged.model.limits import copy_rate
        from paged.study.bench.attention import HeadShape, Load, attention_times, chosen_backends

    if threads is not None:
        torch.set_num_threads(threads)
    new = min(_MOST_NEW, context) if prompt is None else prompt
    load = Load(dtype=dtype, kv_dtype=kv_cache_dtype, sequences=sequences, context=context, prompt=new)
    kind = getattr(torch, dtype)
    cases = [(HeadShape(*numbers), size) for numbers, size in product(pairs, sizes)]
    # Refuse any wrong one before one is timed.
    chosen = [
        chosen_backends(names, shape, size, kind, kv_dtype=kv_cache_dtype, invariant=not fast) for shape, size in cases
    ]
    results: list[AttentionTimes] = []
    num_ended = 0
    try:
        with counting("rounds", rounds * len(cases)) as advance:
            rate = copy_rate()
            for (shape, size), ways in zip(cases, chosen, strict=True):
                results += attention_times(
                    *(ways, shape, size, load, kind), copy_bytes_per_s=rate, rounds=rounds, after_round=advance
                )
                num_ended += 1
    except KeyboardInterrupt:
        if results:
            _show_attention(results, load, rounds, not fast, json)
        say(f"interrupted; {num_ended} of {counted(len(cases), 'measurement')} had ended")
        raise
    _show_attention(results, load, rounds, not fast, json)


def _numbers_of_heads(part: str) -> tuple[int, int, int]:
    try:
        heads, kv_heads, head_size = map(count, part.split("/"))
    except ValueError:
        raise InvalidConfig(
            f'--shapes takes query heads/heads of K and V/size of a head, such as 9/3/64, with commas between; got "{part.strip()}"'
        ) from None
    return heads, kv_heads, head_size


def _show_attention(results: list[AttentionTimes], load: Load, rounds: int, invariant: bool, json: bool) -> None:
    if json:
        print_json(results)
        return
    columns = ["heads", "block", "step", "backend", "ms", "range", "rate"]
    ordered = [
        (result, step)
        for _, group in groupby(results, lambda result: (result.shape, result.block_size))
        for step, result in product(_STEPS, list(group))
    ]
    title = "attention of one layer; in a decode also the share of a copy's rate"
    table(title, columns, [_attention_cells(*each) for each in ordered], right=(1, 4, 5, 6))
    first = results[0]
    figures(
        "what was timed",
        [
            (
                "steps",
                f"{load.dtype}{_kept(load)}, {load.sequences:,} sequences of {load.context:,} tokens, {load.prompt:,} of them new in prompts",
            ),
            ("mode", "batch-invariant" if invariant else "fast"),
            ("rounds", f"{rounds}, on {counted(first.threads, 'thread')}; the median, and the least and the most"),
            ("a copy here", f"{first.copy_bytes_per_s / 1e9:.1f} GB/s, read and written"),
        ],
    )


def _kept(load: Load) -> str:
    return "" if load.kv_dtype == AUTO else f", K and V in {load.kv_dtype}"


def _attention_cells(result: AttentionTimes, step: str) -> list[str]:
    milliseconds, rate = {
        "decode": (
            result.decode_ms,
            f"{result.decode_bytes_per_s / 1e9:,.1f} GB/s, {result.share_of_copy:.0%}",
        ),
        "prefill": (result.prefill_ms, f"{result.prefill_flops_per_s / 1e9:,.0f} GFLOP/s"),
        "mixed": (result.mixed_ms, ""),
    }[step]
    ends = f"{short(milliseconds.least)}–{short(milliseconds.most)}"
    return [str(result.shape), f"{result.block_size:,}", step, result.backend, short(milliseconds.median), ends, rate]


@with_options_of(ModelOptions)
def engine(
    named: ModelOptions,
    workload: Annotated[str, Option(metavar="NAME|TRACE", help=_WORKLOAD_HELP, rich_help_panel=_REQUESTS)] = "offline",
    limit: Annotated[int | None, Option(min=1, help="Serve only this many requests.", show_default="all", rich_help_panel=_REQUESTS)] = None,
    scale: Annotated[float, Option(help="Divide lengths by this number.", rich_help_panel=_REQUESTS)] = 1.0,
    rate_scale: Annotated[float | None, Option(help="Requests arrive as in the trace, this many times as fast.", show_default="all at once", rich_help_panel=_REQUESTS)] = None,
    blocks: Annotated[int | None, Option(min=1, help="Device blocks.", show_default="by --memory-share", rich_help_panel=_MEMORY)] = None,
    memory_share: Annotated[float | None, Option(help="Size of the pool as a share of what concurrent requests need without sharing.", show_default="1", rich_help_panel=_MEMORY)] = None,
    block_size: Annotated[int, Option(min=1, help="Tokens a block.", rich_help_panel=_MEMORY)] = 16,
    max_sequences: Annotated[int, Option(min=1, help="Sequences in a step.", rich_help_panel=_MEMORY)] = 128,
    max_tokens_per_step: Annotated[int, Option(min=1, help="Token budget of a step.", rich_help_panel=_MEMORY)] = 2048,
    runs: Annotated[int, Option(min=1, help="Runs, after a first one that does not count.", rich_help_panel=_TIMING)] = 3,
    json: Json = False,
) -> None:  # fmt: skip
    """Serve requests on the engine: output tokens a second, latencies, preemptions, and how many times the floor it takes.

    The floor is the least time that the steps could take here. A step takes at least the time to read weights, K and V at the rate of memory,
    and the time of its operations at the rate of a large product; both rates are measured at the start. Each run begins with a new engine and an
    empty cache. Lengths are clipped to what the model takes.

    Example: `paged bench engine --workload offline --memory-share 0.35 --runs 5`
    """
    _check_pool(blocks, memory_share, rate_scale)
    # Refuse a wrong workload before a model is loaded.
    made_workload(workload, limit=limit, scale=scale)
    loaded = named.loaded("bench")
    from paged.study.bench.engine import EngineBench, Serving, blocks_wanted

    trace = made_workload(workload, limit=limit, scale=scale, context=loaded.max_length)
    if blocks is None:
        share = 1.0 if memory_share is None else memory_share
        blocks = max(1, round(blocks_wanted(trace, block_size, max_sequences) * share))
    serving = Serving(
        num_blocks=blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens_per_step,
        **named.engine_options,
    )
    bench = EngineBench(loaded, trace, serving, rate=rate_scale)

    def show(found: list[EngineRun]) -> None:
        times = bench.times(found, model=named.name, workload=workload)
        print_json(times) if json else _show_engine(times)

    # The first run pays for what is made once.
    counted_runs = islice((bench.run() for _ in range(1 + runs)), 1, None)
    show(all_of(counted_runs, runs, "run", show))


def _check_pool(blocks: int | None, memory_share: float | None, rate_scale: float | None) -> None:
    if blocks is not None and memory_share is not None:
        raise InvalidConfig("--blocks and --memory-share both say how large the pool is; give one")
    for option, value in (("--memory-share", memory_share), ("--rate-scale", rate_scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidConfig(f"{option} is {value:g}; it has to be a finite number above 0")


def _show_engine(times: EngineTimes) -> None:
    serving, limits, runs = times.serving, times.limits, times.runs
    mode = "batch-invariant" if serving.batch_invariant else "fast"
    on = f"on {counted(limits.threads, 'thread')}"
    requests = (
        f"{counted(times.requests, 'request')}, {times.prompt_tokens:,} tokens in and {times.output_tokens:,} out"
    )
    floor = [run.floor_s for run in runs if run.floor_s is not None]
    figures(
        f"{times.model}: {times.workload}, {counted(len(runs), 'run')}; the median, the least and the most",
        [
            ("model", f"{times.model}, {times.parameters:,} parameters, {times.dtype}, {times.backend}, {mode}, {on}"),
            ("requests", "; ".join([f"{times.workload}: {requests}", *times.applied])),
            (
                "pool",
                f"{counted(serving.num_blocks, 'block')} of {counted(serving.block_size, 'token')}; "
                f"steps of at most {counted(serving.max_tokens_per_step, 'token')} and {counted(serving.max_sequences, 'sequence')}",
            ),
            ("runs", f"{len(runs):,}, of {counted(runs[0].steps, 'step')}"),
            ("output tokens/s", _over(runs, lambda run: run.tokens_per_s, ",.0f")),
            ("TTFT p50, ms", _over(runs, lambda run: _ms(run.ttft_s.p50), ",.1f")),
            ("TTFT p99, ms", _over(runs, lambda run: _ms(run.ttft_s.p99), ",.1f")),
            ("ITL p50, ms", _over(runs, lambda run: _ms(run.itl_s.p50), ",.2f")),
            ("ITL p99, ms", _over(runs, lambda run: _ms(run.itl_s.p99), ",.2f")),
            ("preemptions", _over(runs, lambda run: run.preemptions, ",.0f")),
            ("recomputed tokens", _over(runs, lambda run: run.recomputed_tokens, ",.0f")),
            ("computed prompt tokens", _over(runs, lambda run: run.computed_prompt_tokens, ",.0f")),
            ("times the floor", _over(runs, lambda run: run.times_floor, ",.2f")),
            (
                "the floor",
                (f"{Measured.of(floor):,.3f} s; " if floor else "")
                + f"memory gives {limits.read_bytes_per_s / 1e9:,.1f} GB/s, products {limits.flops_per_s / 1e9:,.0f} GFLOP/s {on}",
            ),
        ],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _over(runs: Sequence[EngineRun], figure: Callable[[EngineRun], float | None], form: str) -> str:
    """Return a figure over all runs; "none" if it is missing in one."""
    values = [value for value in map(figure, runs) if value is not None]
    return format(Measured.of(values), form) if len(values) == len(runs) else "none"


@with_options_of(ModelOptions)
def step(
    named: ModelOptions,
    rows: Annotated[int, Option(min=1, help="Decoding sequences.")] = 64,
    context: Annotated[int, Option(min=1, help="Prompt tokens of each sequence.")] = 256,
    block_size: Annotated[int, Option(min=1, help="Tokens a block.")] = 16,
    steps: Annotated[int, Option(min=1, help="Steps to time.")] = 64,
    json: Json = False,
) -> None:  # fmt: skip
    """Time the parts of a step in which every sequence decodes a token: the host's, and the forward pass.

    Figures are medians over the engine's own steps. A model that runs as one call into C runs the last step again, with and without attention,
    and its products alone; their shares divide the forward pass.

    Example: `paged bench step --rows 64 --context 512`
    """
    loaded = named.loaded("bench")
    from paged.study.bench.step import step_parts

    found = step_parts(
        loaded,
        name=named.name,
        rows=rows,
        context=context,
        steps=steps,
        block_size=block_size,
        **named.engine_options,
    )
    if json:
        print_json(found)
    else:
        _show_step(found)


def _show_step(found: StepParts) -> None:
    total = found.step_us.median
    parts: list[tuple[str, Measured | float | None]] = [
        ("schedule", found.schedule_us),
        ("inputs", found.inputs_us),
        ("forward pass", found.forward_us),
        ("  attention", found.attention_us),
        ("  products", found.products_us),
        ("  the rest", found.rest_us),
        ("sampling", found.sampling_us),
        ("update", found.update_us),
        ("outputs", found.outputs_us),
        ("a step", found.step_us),
    ]
    shown = [_step_cells(name, value, total) for name, value in parts if value is not None]
    table("a decode step", ["part", "µs", "fastest", "slowest", "of a step"], shown, right=range(1, 5))
    mode = "batch-invariant" if found.batch_invariant else "fast"
    pairs = [
        ("the host's share", f"{found.host_share:.1%}: all but the forward pass"),
        ("rows", f"{found.rows:,}, prompts of {found.context:,} tokens, {counted(found.steps, 'step')}"),
        ("model", f"{found.model}, {found.dtype}, {found.backend}, {mode}, on {counted(found.threads, 'thread')}"),
    ]
    if found.attention_us is not None:
        pairs.append(("within the forward pass", "shares of the last step's pass, made again outside any step"))
    figures("what was timed", pairs)


def _step_cells(name: str, value: Measured | float, total: float) -> list[str]:
    if isinstance(value, Measured):
        median, ends = value.median, [f"{value.least:,.1f}", f"{value.most:,.1f}"]
    else:
        median, ends = value, ["", ""]
    return [name, f"{median:,.1f}", *ends, f"{median / total:.1%}"]


bench = group_of("Measure the scheduler, attention and the engine on this machine.", scheduler, attention, engine, step)
