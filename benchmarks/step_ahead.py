"""What the executor costs a step, held against an earlier commit, and what a step ahead is worth with the model on a thread of its own.

    git worktree add /tmp/before 7e920dca
    python benchmarks/step_ahead.py /tmp/before FOLDER      # writes results/step-ahead.md; FOLDER: a model of SmolLM2-135M's shape

Greedy decodes, each run in a process of its own, all in turns. The model is busy from the copies of a step to its samples; what the rest is of the time from
the first step to the last is the host's share of the critical path. With a core for the model's threads and none for the host the two wait for each
other: the page says on how many cores it was taken.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from plain_rows import commit
from spread import spread

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "step-ahead.md"
app = typer.Typer(add_completion=False)
PROGRAM = """
import json, sys, time, torch
from paged import Engine, SamplingParams
from paged.model.loading import load_model
model, rows, output, ahead, threads = load_model(sys.argv[1]), *map(int, sys.argv[2:])
torch.set_num_threads(threads)
def run(output):
    engine = Engine(model, num_blocks=rows * (output // 16 + 2), block_size=16, max_sequences=rows, max_tokens_per_step=8 * rows, steps_ahead=ahead)
    for number in range(rows):
        engine.add_request([number % 50 + 5, 1, 2], SamplingParams(max_tokens=output, ignore_eos=True))
    worker, clock, times = engine.worker, time.perf_counter, []
    begin, keep = worker.begin, worker.keep
    def begin_noted(step):
        times.append(clock())
        begin(step)
    def keep_noted(step, tokens):
        keep(step, tokens)
        times.append(clock())
    worker.begin, worker.keep = begin_noted, keep_noted
    began, cpu = clock(), time.process_time()
    while engine.has_unfinished:
        engine.step()
    seconds, cpu = clock() - began, time.process_time() - cpu
    busy = sum(end - start for start, end in zip(times[::2], times[1::2]))
    tokens = engine.stats().output_tokens
    return {"tokens_per_s": tokens / seconds, "cpu_ms": cpu / len(times[::2]) * 1e3, "host_share": 1 - busy / (times[-1] - times[0])}
run(2)
print(json.dumps(run(output)))
"""


def measured(tree: Path, model: str, *numbers: int) -> dict[str, float]:
    """A run in a process of its own: output tokens/s, CPU milliseconds a step, and the host's share."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    arguments = [sys.executable, "-c", PROGRAM, model, *map(str, numbers)]
    done = subprocess.run(arguments, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@app.command()
def main(
    before: Annotated[Path, typer.Argument(help="A checkout of the earlier commit.")],
    folder: Annotated[Path, typer.Argument(help="A checkpoint of the larger model.")],
    rounds: int = 7,
    rows: int = 64,
    output: int = 32,
    threads: int = 1,
    page: Path = RESULTS,
) -> None:
    """Time all, and write the page."""
    from paged.model.machine import machine

    runs = {"before": (before, 0), "now": (REPOSITORY, 0), "a step ahead": (REPOSITORY, 1)}
    lines = []
    for model, length in (("embedded", 8 * output), (str(folder), output)):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for number in range(rounds):
            for name in list(runs)[:: 1 if number % 2 else -1]:
                tree, ahead = runs[name]
                found[name].append(measured(tree, model, rows, length, ahead, threads))
        of = {name: {key: np.array([each[key] for each in its]) for key in its[0]} for name, its in found.items()}
        for name, its in of.items():
            base = of["now" if name == "a step ahead" else "before"]
            faster, dearer = its["tokens_per_s"] / base["tokens_per_s"], its["cpu_ms"] / base["cpu_ms"]
            cells = [spread(its["tokens_per_s"], ",.0f"), spread(faster, ".3f"), spread(its["cpu_ms"], ",.2f")]
            cells += [
                spread(dearer, ".3f"),
                f"{its['cpu_ms'].min() / base['cpu_ms'].min():.3f}",
                spread(100 * its["host_share"], ".2f"),
            ]
            lines.append(f"| {Path(model).name} | {name} | {' | '.join(cells)} |")
    its = machine()
    text = [
        "# A step ahead, and what the executor costs",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}, {threads} threads of torch. {rows} rows decode greedily, {rounds} processes each, in turns. "
        f"Before: {commit(before)}, no step ahead. Now: {commit(REPOSITORY)}, by an executor, no step ahead, and over before. A step ahead: the same, one step ahead with the model on a thread of its own, and over now. Medians, least and most.",
        "",
        "```",
        "git worktree add /tmp/before 7e920dca",
        f"python benchmarks/step_ahead.py /tmp/before {folder} --threads {threads}",
        "```",
        "",
        "| model | run | output tokens/s | over the one it is held against | CPU ms a step | over it | least over least | host's share of the critical path, % |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *lines,
        "",
    ]
    page.write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    app()
