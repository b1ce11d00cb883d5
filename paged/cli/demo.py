"""`paged demo`: an excerpt of a real service's day on a pool far too small for it, live."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from paged.cli.frame import Frame
from paged.cli.options import Json, PoolOptions
from paged.cli.replay import VIOLATIONS_FOUND
from paged.cli.show import console, print_json, printed
from paged.cli.summary import print_summary
from paged.cli.view import render
from paged.cli.watch import Watch
from paged.replay import Replay, StepTime
from paged.traces import excerpt_path, read_trace

TITLE = "paged demo · a chat service on far too small a memory"
REQUESTS = 160
RATE_SCALE = 64
PROMPT_SCALE = 1 / 8
OUTPUT_SCALE = 1 / 4
STEPS_PER_SECOND = 28.0
FRAMES_PER_SECOND = 28.0
POOL = PoolOptions(blocks=228, block_size=16, host_blocks=24, policy="paged", max_tokens_per_step=256, max_sequences=32)


def demo(
    speed: Annotated[
        float, typer.Option(min=0.1, max=1000, help="So many times as fast; only for watching in a terminal.")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Watch a real service's requests press on a memory that is far too small for them.

    160 requests of Mooncake's published conversation trace arrive 64 times as fast as they did, with prompts an eighth and outputs a
    quarter as long, at 228 blocks of 16 tokens and 24 more on the host. Every block is a cell: one request's (its colour), shared by several, cached, or free. Every invariant is
    recomputed before and after each update. Takes about half a minute in a terminal, and a few seconds into a pipe or with --json.

    Example: `paged demo --speed 2`
    """
    trace = read_trace(excerpt_path("mooncake"), limit=REQUESTS).scaled(
        rate=RATE_SCALE, prompts=PROMPT_SCALE, outputs=OUTPUT_SCALE
    )
    step_time = StepTime()
    replay = Replay(trace, POOL.scheduler(step_time), step_time, check=True)
    out = console()
    if json:
        for _ in replay.steps():
            pass
    elif out.is_terminal:
        _play(replay, out, speed)
    else:
        _report(replay)
    result = replay.result()
    if json:
        print_json(result)
    else:
        print_summary(result)
    if result.violations:
        raise typer.Exit(VIOLATIONS_FOUND)


def _play(replay: Replay, out: Console, speed: float) -> None:
    """Draw the replay at a pace that eyes can follow; the last frame stays."""
    watch = Watch(replay)
    due = time.monotonic()
    next_frame = due
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for step in replay.steps():
            watch.see(step)
            due += 1 / (STEPS_PER_SECOND * speed)
            now = time.monotonic()
            if now >= next_frame:
                live.update(_drawn(watch.frame(), out), refresh=True)
                next_frame = now + 1 / FRAMES_PER_SECOND
            time.sleep(max(due - time.monotonic(), 0))
        live.update(_drawn(watch.frame(), out), refresh=True)


def _drawn(frame: Frame, out: Console):
    # One line less than the terminal has: a full one would scroll.
    return render(frame, TITLE, out.width, out.height - 1)


def _report(replay: Replay) -> None:
    """A line whenever another tenth of the requests has ended."""
    watch = Watch(replay)
    printed(TITLE)
    tenths = 0
    for step in replay.steps():
        watch.see(step)
        counts = replay.scheduler.counts()
        ended = counts["finished"] + counts["rejected"]
        if ended * 10 // len(replay.trace) > tenths:
            tenths = ended * 10 // len(replay.trace)
            printed(progress_line(watch.frame()))


def progress_line(frame: Frame) -> str:
    """A frame in one line."""
    states = "  ".join(
        f"{state} {frame.counts.get(state, 0):3}" for state in ("waiting", "running", "paused", "swapped", "finished")
    )
    blocks = f"{frame.used:3} of {len(frame.cells)} blocks used, {frame.cached:3} cached"
    preempted = f"preempted {frame.preemptions_recompute:2} by recompute, {frame.preemptions_swap:2} by swap"
    return f"step {frame.step:5,}  {frame.now_s:6.2f} s  {blocks}  {states}  {preempted}  hits {frame.hit_tokens:6,} tokens"
