"""Tokens a second on an idle machine and beside a process that never sleeps, with as many threads as cores are free and with a fixed number.

    python ../shared/peers/make_model.py models/135m smollm2-135m      # random weights in that shape
    python benchmarks/busy_core.py models/135m                        # writes results/busy-core.md

Each run is a process of its own; the ways take turns.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from spread import spread

from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "busy-core.md"
app = typer.Typer(add_completion=False)
ROWS, PROMPT, OUTPUT = 8, 64, 16
PROGRAM = f"""
import sys, time
from paged import LLM, SamplingParams, load_model
from paged.model.threads import FreeCores
if sys.argv[2] == "fixed":
    FreeCores.count = lambda self: self._cores
llm = LLM(load_model(sys.argv[1]), batch_invariant=sys.argv[3] == "batch-invariant")
prompts = [[number + 5, 6, 7, 8] * {PROMPT // 4} for number in range({ROWS})]
started = time.perf_counter()
llm.generate(prompts, SamplingParams(max_tokens={OUTPUT}, ignore_eos=True), use_tqdm=False)
print({ROWS * OUTPUT} / (time.perf_counter() - started))
"""


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    """A process that never sleeps, or none."""
    if not busy:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.5)
    try:
        yield
    finally:
        other.kill()
        other.wait()


def rate(model: Path, way: str, mode: str) -> float:
    """Tokens a second of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), way, mode], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@app.command()
def main(model: Annotated[Path, typer.Argument(help="A checkpoint folder.")], rounds: int = 5) -> None:
    """Time all, and write the page."""
    lines = []
    for mode in ("packed", "batch-invariant"):
        rates: dict[tuple[str, bool], list[float]] = {}
        for _ in range(rounds):
            for busy in (False, True):
                with beside(busy):
                    for way in ("fixed", "free"):
                        rates.setdefault((way, busy), []).append(rate(model, way, mode))
        for way, words in (("fixed", "fixed, as torch has it"), ("free", "as many as cores are free")):
            kept = np.median(rates[way, True]) / np.median(rates[way, False])
            lines.append(
                f"| {mode} | {words} | {spread(rates[way, False], ',.1f')} | {spread(rates[way, True], ',.1f')} | {kept:.2f} × |"
            )
    its = machine()
    page = [
        "# Beside a busy core",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}, float32. Model: {model.name}; {ROWS} requests of {PROMPT} tokens, {OUTPUT} answered, {rounds} processes each, in turns. Tokens a second.",
        "",
        "```",
        f"python benchmarks/busy_core.py models/{model.name}",
        "```",
        "",
        "| mode | threads | idle | beside a process that never sleeps | kept |",
        "|---|---|--:|--:|--:|",
        *lines,
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
