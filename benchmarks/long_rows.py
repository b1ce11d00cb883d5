"""What a decode step costs when its rows are long, and when dead rows lie between them: our scheduler alone, no model.

Four shapes of the same step: 256 or 131,072 tokens a row, dense or with holes (twice the rows are admitted and a seeded
half of them aborted, so that the live ones lie scattered over the tables). A step that walked its rows' tables would cost
512 times more at the long ones. Each measurement is a process of its own, the shapes take turns, and every run is kept.
Needs about 12 GiB of memory at the default sizes.

    python benchmarks/long_rows.py --json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_SIZE = 16
# One block of every row: rows admitted together cross a block boundary in the same step, once in so many.
WINDOW = BLOCK_SIZE
WARM_STEPS = 2 * WINDOW
PREFILL_BUDGET = 1 << 20
SHORT, LONG = 256, 131_072
SHAPES = {
    "short, dense": (SHORT, False),
    "short, holes": (SHORT, True),
    "long, dense": (LONG, False),
    "long, holes": (LONG, True),
}
GOAL = 1.5


def measure(*, num_rows: int, num_prompt_tokens: int, has_holes: bool, num_steps: int) -> dict[str, Any]:
    """Microseconds of CPU time of one decode step (schedule + update) of `num_rows` rows, prefix caching on.

    The median over windows of 16 steps of the window's mean, as `vllm_sched.py` takes it.
    """
    import paged

    rng = np.random.default_rng(0)
    num_admitted = 2 * num_rows if has_holes else num_rows
    max_model_len = num_prompt_tokens + WARM_STEPS + num_steps + 2 * WINDOW + num_admitted
    blocks_per_row = -(-max_model_len // BLOCK_SIZE) + 1
    # A tenth more than the rows will hold, so that no watermark delays the last of them.
    manager = paged.BlockManager(num_admitted * 16 + num_rows * blocks_per_row * 11 // 10, BLOCK_SIZE)
    scheduler = paged.Scheduler(
        manager,
        max_tokens_per_step=PREFILL_BUDGET,
        max_sequences=num_admitted,
        max_model_len=max_model_len,
    )
    doomed = set(rng.permutation(num_admitted)[: num_admitted - num_rows].tolist())
    for i in range(num_admitted):
        # A row that will be a hole needs a row, not a long prompt.
        length = 16 if i in doomed else num_prompt_tokens
        prompt = rng.integers(10, 32_000, length).astype(np.int32)
        scheduler.add(paged.Request(id=f"r{i}", prompt=prompt, max_tokens=max_model_len))

    def step() -> tuple[int, float]:
        start = time.thread_time()
        batch = scheduler.schedule()
        scheduled = time.thread_time()
        counts = batch.samples.astype(np.int64)
        tokens = np.full(int(counts.sum()), 7, np.int32)
        resumed = time.thread_time()
        scheduler.update(batch, tokens, counts)
        return len(batch.rows), time.thread_time() - resumed + scheduled - start

    while scheduler.counts()["waiting"] or any(manager.rows.num_tokens - manager.rows.num_computed > 1):
        step()
    for i in sorted(doomed):
        scheduler.abort(f"r{i}")
    for _ in range(WARM_STEPS):
        step()
    gc.collect()
    seconds = []
    for _ in range(num_steps // WINDOW * WINDOW):
        num_scheduled, elapsed = step()
        if num_scheduled != num_rows:
            raise RuntimeError(f"{num_scheduled} rows ran, {num_rows} should; the shape is not the one to measure")
        seconds.append(elapsed)
    windows = np.array(seconds).reshape(-1, WINDOW).mean(axis=1) * 1e6
    return {
        "us_per_step": float(np.median(windows)),
        "us_best_window": float(windows.min()),
        "us_max_step": max(seconds) * 1e6,
        "rows": num_rows,
        "highest_row": int(max(scheduler.schedule().rows)),
        "tokens_per_row": num_prompt_tokens,
        "steps": len(seconds),
    }


def measured_in_a_process(shape: str, num_rows: int, num_steps: int) -> dict[str, Any]:
    """`measure` of one shape in a fresh interpreter, so that no shape inherits another's heap."""
    command = [sys.executable, __file__, "--shape", shape, "--rows", str(num_rows), "--steps", str(num_steps)]
    repository = str(Path(__file__).resolve().parents[1])
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": repository})
    if run.returncode:
        raise RuntimeError(f"{shape} failed:\n{run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def compared(num_rows: int, num_steps: int, rounds: int) -> dict[str, Any]:
    """Every shape `rounds` times, in turns; for each its runs, their median and its ratio to "short, dense"."""
    runs: dict[str, list[dict[str, Any]]] = {shape: [] for shape in SHAPES}
    for _ in range(rounds):
        for shape in SHAPES:
            runs[shape].append(measured_in_a_process(shape, num_rows, num_steps))
    medians = {shape: statistics.median(run["us_per_step"] for run in of_shape) for shape, of_shape in runs.items()}
    base = medians["short, dense"]
    return {
        "goal_ratio": GOAL,
        "shapes": [
            {"shape": shape, "us_per_step": medians[shape], "ratio": medians[shape] / base, "runs": runs[shape]}
            for shape in SHAPES
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="sequences that decode (default 1024)")
    parser.add_argument("--steps", type=int, default=512, help="steps measured, a multiple of 16 (default 512)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each shape (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shape:
        num_tokens, has_holes = SHAPES[args.shape]
        result = measure(num_rows=args.rows, num_prompt_tokens=num_tokens, has_holes=has_holes, num_steps=args.steps)
        print(json.dumps(result))
        return
    document = compared(args.rows, args.steps, args.rounds)
    if args.json:
        print(json.dumps(document, indent=1))
        return
    for row in document["shapes"]:
        print(f"{row['shape']:14} {row['us_per_step']:8.1f} us a step   {row['ratio']:.2f} x")


if __name__ == "__main__":
    main()
