"""Why requests join and leave a batch at every step: a queue of 32, a batch of 8, every eighth request 100 tokens long, the others 10.

    python examples/continuous_batching.py      # needs the extra cli

A static batch lasts as long as its longest request: four batches of 100 steps. In flight, a place that becomes free is taken in the
next step, so the short ones pass beside the long ones. The counts can be checked by hand.
"""

import sys

from rich.console import Console
from rich.progress import Progress

from paged import Engine, SamplingParams
from paged.checkpoint import checkpoint_path

LENGTHS = [100 if i % 8 == 0 else 10 for i in range(32)]


def steps(policy: str) -> int:
    """Steps until all 32 have their tokens."""
    engine = Engine(checkpoint_path(), policy=policy, num_blocks=256, max_sequences=8, max_tokens_per_step=64)
    for length in LENGTHS:
        engine.add_request("A queue", SamplingParams(max_tokens=length, ignore_eos=True))
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(policy, total=len(LENGTHS))
        while engine.has_unfinished:
            ended = [output for output in engine.step() if output.finish_reason]
            progress.advance(bar, len(ended))
    return engine.stats().steps


if __name__ == "__main__":
    static, in_flight = steps("static"), steps("paged")
    print(f"static {static} steps, in flight {in_flight} steps, {static / in_flight:.1f} times as fast")
