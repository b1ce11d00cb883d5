"""What layers of several kinds cost the scheduler: one decode step of the same rows, for models of one, two and three layer groups.

    python benchmarks/groups.py      # writes results/groups.md

1,024 rows with prompts of 256 to 736 tokens decode until the longest has 1,040; prefix caching is on, and no page is short. A step is timed
in two phases. *Early*: windows of 128 pass over the prompts, whose blocks may be kept. *Late*: over what was decoded. Free pages are cheaper
to draw than those of cached content, so both are timed. Each run is a process of its own; the cells take turns, every second round backwards.
"""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from spread import spread

from paged import Batch, BlockManager, LayerGroup, Request, Scheduler
from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "groups.md"
REPOSITORY = Path(__file__).resolve().parents[1]
ROWS, SIZE, PROMPTS = 1_024, 16, (256, 736)
# Rows cross the end of a block in different steps, 64 of 1,024 in each; means are over this many.
WINDOW = SIZE
WARM_STEPS, EARLY_STEPS, LATE_STEPS, READ_STEPS = 32, 64, 112, 16
# The widest of the narrow windows has left every prompt behind.
PASS_STEPS = 80
NUM_STEPS = WARM_STEPS + EARLY_STEPS + PASS_STEPS + LATE_STEPS + READ_STEPS
NARROW = LayerGroup("window", reach=128)
STATE = LayerGroup("state", pages=100)
CELLS = {
    "full": (LayerGroup("full"),),
    "full, window 128": (LayerGroup("full"), NARROW),
    "full of 5, window 1,024 of 26": (LayerGroup("full", pages=5), LayerGroup("window", reach=1_024, pages=26)),
    "full of 5, window 128 of 26": (LayerGroup("full", pages=5), LayerGroup("window", reach=128, pages=26)),
    "full, state of 100": (LayerGroup("full"), STATE),
    "window 128, state of 100": (NARROW, STATE),
}
GOALS = {
    "full, window 128": 1.5,
    "full of 5, window 1,024 of 26": 2.5,
    "full of 5, window 128 of 26": 2.5,
    "full, state of 100": 2.5,
    "window 128, state of 100": 2.5,
}
FREE, CACHED = "free", "cached"
PAGES = {FREE: "Pages are free, and were used before", CACHED: "Pages hold content: each draw evicts"}
# By what pages hold and by cell: of each run, by figure, the windows.
Runs = dict[str, dict[str, list[dict[str, list[float]]]]]
app = typer.Typer(add_completion=False)


def sampled(count: int) -> np.ndarray:
    return np.full(count, 7, np.int32)


def fill(scheduler: Scheduler, rng: np.random.Generator) -> None:
    """Serve other prompts until the content that they leave takes all pages, each of which was used then."""
    pool = scheduler.manager.device
    for number in range(10_000):
        if pool.num_free < pool.num_blocks // 100:
            return
        for other in range(16):
            prompt = rng.integers(10, 32_000, 1_000).astype(np.int32)
            scheduler.add(Request(id=f"before {number}, {other}", prompt=prompt, max_tokens=1))
        while scheduler.has_unfinished:
            batch = scheduler.schedule(0.0)
            scheduler.update(batch, sampled(int(batch.samples.sum())), now=0.0)
    raise RuntimeError(f"{pool.num_free} of {pool.num_blocks} pages are still free")


def decoding(groups: tuple[LayerGroup, ...], evicts: bool, rows: int = ROWS) -> Scheduler:
    """A scheduler whose rows have all computed their prompts; they end after all that is timed, and no page is short. All
    pages were used before; `evicts`: they hold content, so that each draw evicts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*PROMPTS, rows, endpoint=True)
    blocks = int((-(-(lengths + NUM_STEPS + 8) // SIZE)).sum())
    of_blocks = sum(group.pages for group in groups if group.kind != "state")
    # A state that is kept is another one.
    of_states = 3 * sum(group.pages for group in groups if group.kind == "state")
    num_pages = (blocks * of_blocks + rows * of_states) * 11 // 10
    scheduler = Scheduler(BlockManager(num_pages, SIZE, groups=groups), max_tokens_per_step=1 << 20, max_sequences=rows)
    fill(scheduler, rng)
    if not evicts:
        scheduler.manager.reset_cache()
    for number, length in enumerate(lengths.tolist()):
        prompt = rng.integers(10, 32_000, length).astype(np.int32)
        scheduler.add(Request(id=str(number), prompt=prompt, max_tokens=NUM_STEPS + 8))
    for _ in range(4):
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, sampled(int(batch.samples.sum())), now=0.0)
        if len(batch.rows) == batch.num_scheduled_tokens == rows:
            return scheduler
    raise RuntimeError(f"{scheduler.counts()['running']} of {rows} sequences run; all of them should decode")


def read_tables(groups: tuple[LayerGroup, ...], batch: Batch) -> None:
    """Ask for all that an engine needs of the groups. Of one plain group the batch brings it."""
    for group, of_rows in zip(groups, batch.groups or (), strict=False):
        if group.kind == "state":
            _ = of_rows.read, of_rows.write
        else:
            _ = of_rows.tables


def step(scheduler: Scheduler, groups: tuple[LayerGroup, ...] = (), rows: int = ROWS) -> tuple[float, float]:
    """CPU microseconds of `schedule` and `update`, and of reading these groups' tables between them."""
    started = time.thread_time()
    batch = scheduler.schedule(0.0)
    scheduled = time.thread_time()
    if not len(batch.rows) == batch.num_scheduled_tokens == rows:
        raise RuntimeError(f"{len(batch.rows)} rows ran, {rows} should")
    tokens = sampled(rows)
    began = time.thread_time()
    read_tables(groups, batch)
    read = time.thread_time()
    scheduler.update(batch, tokens, now=0.0)
    return (time.thread_time() - read + scheduled - started) * 1e6, (read - began) * 1e6


def windows(scheduler: Scheduler, warm: int, num_steps: int) -> list[float]:
    """The mean step of each window of 16, after steps that do not count."""
    for _ in range(warm):
        step(scheduler)
    gc.collect()
    return np.array([step(scheduler)[0] for _ in range(num_steps)]).reshape(-1, WINDOW).mean(axis=1).tolist()


def measured(groups: tuple[LayerGroup, ...], evicts: bool) -> dict[str, list[float]]:
    """By figure, microseconds of a step: of each window, and of each reading of the tables."""
    scheduler = decoding(groups, evicts)
    return {
        "early": windows(scheduler, WARM_STEPS, EARLY_STEPS),
        "late": windows(scheduler, PASS_STEPS, LATE_STEPS),
        # Apart: what reads much memory makes the steps beside it slower.
        "tables": [step(scheduler, groups)[1] for _ in range(READ_STEPS)],
    }


def measured_in_a_process(cell: str, pages: str) -> dict[str, list[float]]:
    """`measured` of one cell in a fresh interpreter, so that none inherits another's heap."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--cell", cell, "--pages", pages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


@app.command()
def main(
    rounds: int = 5,
    cell: Annotated[str, typer.Option(hidden=True)] = "",
    pages: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time all, and write the page."""
    if cell:
        print(json.dumps(measured(CELLS[cell], pages == CACHED)))
        return
    runs: Runs = {pages: {name: [] for name in CELLS} for pages in PAGES}
    for number in range(rounds):
        for name in list(CELLS)[:: -1 if number % 2 else 1]:
            for pages, of_pages in runs.items():
                of_pages[name].append(measured_in_a_process(name, pages))
    RESULTS.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    page(runs)


def table(runs: dict[str, list[dict[str, list[float]]]]) -> list[str]:
    """A line a cell: medians of runs, the least window, and both over those of one full group."""
    lines = []
    for name, of_cell in runs.items():
        figures = []
        for figure in ("late", "early"):
            medians, least = zip(*((float(np.median(run[figure])), min(run[figure])) for run in of_cell), strict=True)
            plain = [float(np.median(run[figure])) for run in runs["full"]]
            plain_least = min(min(run[figure]) for run in runs["full"])
            ratios = f"{np.median(np.divide(medians, plain)):.2f} ×, {min(least) / plain_least:.2f} ×"
            figures += [spread(medians, ",.0f"), f"{min(least):,.0f}", "" if name == "full" else ratios]
        goal = f"{GOALS[name]} ×" if name in GOALS else ""
        reads = [float(np.median(run["tables"])) for run in of_cell]
        lines.append(f"| {name} | {' | '.join([*figures[:3], goal, *figures[3:], spread(reads, ',.0f')])} |")
    return lines


def page(runs: Runs) -> None:
    """Write the tables, and print them."""
    its = machine()
    text = [
        "# What layers of several kinds cost the scheduler",
        "",
        f"{its['processor']}, {its['cores']} cores that other work shared, Python {its['python']}, numpy {its['numpy']}. CPU time of the thread.",
        "",
        "```",
        "python benchmarks/groups.py",
        "```",
        "",
        f"µs a step of {ROWS:,} rows that decode: `schedule` and `update`. Prompts of {PROMPTS[0]} to {PROMPTS[1]} tokens, {NUM_STEPS} steps, blocks of {SIZE} tokens, prefix caching on. The median and range of {len(runs[FREE]['full'])} processes in turns, each by its median window of {WINDOW} steps; and the least window of all. Ratios to one full group: the median of those of the rounds, and that of the least windows.",
        "",
        "* late: windows of 128 pass over decoded tokens; early: over their prompts, whose blocks are kept",
        "* tables: reading `tables`, or `read` and `write`, of all groups of the batch once; not in the step",
        "* of 5, of 26, of 100: pages a block, or a state",
    ]
    for pages, of_pages in runs.items():
        text += [
            "",
            f"## {PAGES[pages]}",
            "",
            "| groups | late | least | ratios | goal | early | least | ratios | tables |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
            *table(of_pages),
        ]
    RESULTS.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    app()
