"""What a row that wants nothing costs the engine's host, held against an earlier commit that could do less.

    git worktree add /tmp/before 3fc5d15
    python benchmarks/plain_rows.py /tmp/before      # writes results/plain-rows.md

Greedy rows on the kit's tiny model; host time is what the engine counts as such: schedule, inputs, sampling, update and text. Each run is a process of
its own, and the two take turns.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from spread import spread

RESULTS = Path(__file__).resolve().parent / "results" / "plain-rows.md"
REPOSITORY = Path(__file__).resolve().parents[1]
ROWS, OUTPUT = (16, 64, 256), 60
app = typer.Typer(add_completion=False)
PROGRAM = """
import sys, torch
from paged import Engine, SamplingParams
from paged.testing.tiny_model import tiny_model
torch.set_num_threads(1)
rows, output = int(sys.argv[1]), int(sys.argv[2])
best = []
for _ in range(6):
    engine = Engine(tiny_model(), num_blocks=rows * 8, block_size=16, max_sequences=rows, max_tokens_per_step=8 * rows)
    for number in range(rows):
        engine.add_request([number % 8, 1, 2], SamplingParams(max_tokens=output, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    best.append(stats.host_s / stats.steps)
print(sorted(best[1:])[2] * 1e6)
"""


def host_time(tree: Path, rows: int) -> float:
    """Microseconds a step, the median of five, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows), str(OUTPUT)],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def commit(tree: Path) -> str:
    """Which one is checked out."""
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@app.command()
def main(before: Annotated[Path, typer.Argument(help="A checkout of the earlier commit.")], rounds: int = 7) -> None:
    """Time both, and write the page."""
    from paged.model.machine import machine

    lines = []
    for rows in ROWS:
        times: dict[Path, list[float]] = {before: [], REPOSITORY: []}
        for number in range(rounds):
            for tree in (before, REPOSITORY) if number % 2 else (REPOSITORY, before):
                times[tree].append(host_time(tree, rows))
        ratio = [now / then for now, then in zip(times[REPOSITORY], times[before], strict=True)]
        lines.append(
            f"| {rows} | {spread(times[before], ',.0f')} | {spread(times[REPOSITORY], ',.0f')} | {np.median(ratio):.2f} × ({min(ratio):.2f} to {max(ratio):.2f}) |"
        )
    its = machine()
    page = [
        "# A row that wants nothing",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}. Host time of a step of greedy rows, µs: the median of five, {rounds} processes each, in turns. Before: {commit(before)}, which knew temperature, top-k, top-p and a seed. Now: {commit(REPOSITORY)}.",
        "",
        "```",
        "git worktree add /tmp/before 3fc5d15",
        "python benchmarks/plain_rows.py /tmp/before",
        "```",
        "",
        "| rows | before | now | now over before |",
        "|--:|--:|--:|--:|",
        *lines,
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
