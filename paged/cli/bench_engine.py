"""`paged bench engine`: requests on the engine, beside the least time that this machine could take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paged.base.words import counted
from paged.cli.commands import with_options_of
from paged.cli.models import ModelOptions
from paged.cli.options import Json
from paged.cli.show import all_of, figures, print_json
from paged.errors import InvalidConfig
from paged.study.bench.workloads import WORKLOADS, Measured, workload as made_workload

if TYPE_CHECKING:
    from paged.study.bench.engine import EngineRun, EngineTimes

_REQUESTS, _MEMORY, _TIMING = "The requests", "Memory and steps", "How it is timed"
_WORKLOAD_HELP = (
    f"{', '.join(WORKLOADS)}, or a trace as `paged simulate` takes: a file, an excerpt's name, `synthetic:…`. offline: 64 requests of log-normal "
    "lengths, about 160 tokens in and 96 out; shared_prefix: 64 of 4 families that share 512 tokens each; single: one, 128 in and 128 out."
)


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
    _check(blocks, memory_share, rate_scale)
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
        print_json(times) if json else _show(times)

    # The first run pays for what is made once.
    counted_runs = islice((bench.run() for _ in range(1 + runs)), 1, None)
    show(all_of(counted_runs, runs, "run", show))


def _check(blocks: int | None, memory_share: float | None, rate_scale: float | None) -> None:
    if blocks is not None and memory_share is not None:
        raise InvalidConfig("--blocks and --memory-share both say how large the pool is; give one")
    for option, value in (("--memory-share", memory_share), ("--rate-scale", rate_scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidConfig(f"{option} is {value:g}; it has to be a finite number above 0")


def _show(times: EngineTimes) -> None:
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
