"""`paged.simulator`: a real service's arrivals and lengths on a pool of your size."""

import sys

import typer
from rich.console import Console
from rich.progress import Progress

from paged.cli import options
from paged.cli.show import print_json
from paged.cli.summary import print_summary
from paged.simulator import Simulation, StepTime

VIOLATIONS_FOUND = 1
_TIME = StepTime()


def replay(
    trace: options.TraceArgument,
    blocks: options.Blocks = 26_000,
    block_size: options.BlockSize = 16,
    host_blocks: options.HostBlocks = 0,
    prefix_caching: options.PrefixCaching = True,
    policy: options.PolicyName = "paged",
    max_tokens_per_step: options.MaxTokensPerStep = 2048,
    max_sequences: options.MaxSequences = 256,
    limit: options.Limit = None,
    rate_scale: options.RateScale = 1.0,
    length_scale: options.LengthScale = 1.0,
    prompt_scale: options.PromptScale = 1.0,
    output_scale: options.OutputScale = 1.0,
    seed: options.Seed = 0,
    weights_ms: options.WeightsMs = _TIME.weights_ms,
    context_us: options.ContextUs = _TIME.context_us,
    token_us: options.TokenUs = _TIME.token_us,
    swap_us: options.SwapUs = _TIME.swap_us,
    check: options.Check = False,
    json: options.Json = False,
) -> None:
    """Simulation a trace through the real memory manager and scheduler, on a virtual clock, and report what became of it.

    Arrivals and lengths are the trace's. Nothing is computed: tokens come from a stand-in for the model, idle time is skipped,
    and a step takes max(weights + context · tokens attended to, token · tokens computed) + swap · tokens moved. The defaults
    resemble an 8B model in bf16 on one H100: published figures, not measurements.

    Example, half the memory and requests twice as fast:

    `paged replay mooncake --blocks 13000 --host-blocks 8000 --rate-scale 2`
    """
    pool = options.PoolOptions(
        blocks, block_size, host_blocks, policy, max_tokens_per_step, max_sequences, prefix_caching
    )
    step_time = StepTime(weights_ms, context_us, token_us, swap_us)
    scheduler = pool.scheduler(step_time)
    requests = options.open_trace(trace, limit=limit, seed=seed)
    requests = requests.scaled(
        rate=rate_scale, prompts=length_scale * prompt_scale, outputs=length_scale * output_scale
    )
    run = Simulation(requests, scheduler, step_time, check=check)
    _go_through(run)
    result = run.result()
    if json:
        print_json(result)
    else:
        print_summary(result)
    if result.violations:
        print(f"paged: {result.violations} violations; the first: {result.violation_messages[0]}", file=sys.stderr)
        raise typer.Exit(VIOLATIONS_FOUND)


def _go_through(run: Simulation) -> None:
    """Run to the end, with a bar on standard error for somebody who waits at a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        # A bar that is disabled prints an empty line with some versions of Rich.
        for _ in run.steps():
            pass
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("requests", total=len(run.trace))
        for step in run.steps():
            progress.advance(bar, len(step.ended))
