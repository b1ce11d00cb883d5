"""Why requests join and leave a batch at every step: a queue of 32, a batch of 8, every eighth request 100 tokens long, the others 10.

    python examples/continuous_batching.py      # needs the extra cli

A static batch lasts as long as its longest request: four batches of 100 steps. In flight, a place that becomes free is taken in the
next step, so the short ones pass beside the long ones. The counts can be checked by hand.
"""

import sys
import time
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from paged import Engine, SamplingParams
from paged.model.checkpoint import checkpoint_path

LENGTHS = [100 if i % 8 == 0 else 10 for i in range(32)]


class Times(NamedTuple):
    """Steps and seconds until all 32 have their tokens, and seconds until a short one has, on average."""

    steps: int
    seconds: float
    short: float


def times(policy: str) -> Times:
    """Of one way."""
    engine = Engine(checkpoint_path(), policy=policy, num_blocks=256, max_sequences=8, max_tokens_per_step=64)
    began = time.perf_counter()
    for number, length in enumerate(LENGTHS):
        engine.add_request("A queue", SamplingParams(max_tokens=length, ignore_eos=True), id=str(number), arrival=began)
    short = []
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(policy, total=len(LENGTHS))
        while engine.has_unfinished:
            ended = [output for output in engine.step() if output.finish_reason]
            progress.advance(bar, len(ended))
            short += [each.timings.e2e_s for each in ended if each.timings is not None and LENGTHS[int(each.id)] == 10]
    return Times(engine.stats().steps, time.perf_counter() - began, sum(short) / len(short))


if __name__ == "__main__":
    found = {"static": times("static"), "in flight": times("paged")}
    for way, its in found.items():
        print(f"{way:10} {its.steps:4} steps  {its.seconds:5.2f} s  a short answer after {its.short:.2f} s on average")
    print(f"{found['static'].steps / found['in flight'].steps:.1f} times fewer steps")
