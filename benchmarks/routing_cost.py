"""What a routing decision costs on the host: keys of a prompt, and a choice among replicas. `results/routing-cost.md`.

    python benchmarks/routing_cost.py --out benchmarks/results/routing-cost

64 replicas, 10 million blocks indexed, prompts of 6,250 blocks. CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from pathlib import Path
from random import Random

import numpy as np

from paged.engine.replica_index import RESTART, prompt_keys
from paged.engine.routing import Prompt, ReplicaLoad, Router

REPLICAS, INDEXED, BLOCKS, BLOCK_SIZE = 64, 10_000_000, 6_250, 16
GOAL_US, GOAL_KEYS_MS = 200, 12


def filled(router: Router, random: np.random.Generator, indexed: int, *, restart_points: bool) -> list[list[int]]:
    """Give replicas 10 million blocks in runs of 6,250. Return some of them, as paths that replicas have to different depths."""
    paths = []
    for number in range(indexed // BLOCKS):
        keys = random.integers(0, 1 << 63, BLOCKS).tolist()
        router.index.store(str(number % REPLICAS), keys)
        if restart_points:
            router.index.store(str(number % REPLICAS), keys[:: BLOCKS // 4] + keys[-1:], RESTART)
        if number < 100:
            paths.append(keys)
    for number, keys in enumerate(paths):
        # Of every fourth path all replicas have something, each to another depth.
        for place in range(REPLICAS if number % 4 == 0 else number % 4):
            router.index.store(str(place), keys[: int(random.integers(1, BLOCKS))])
    return paths


def times_us(router: Router, paths: list[list[int]], rounds: int) -> np.ndarray:
    """Microseconds of each decision."""
    found = []
    for round_ in range(rounds):
        for number, keys in enumerate(paths):
            prompt = Prompt(f"{round_}-{number}", keys, BLOCKS * BLOCK_SIZE)
            began = time.thread_time_ns()
            choice = router.choose(prompt, float(round_))
            found.append((time.thread_time_ns() - began) / 1e3)
            made = router.routed(prompt, choice.replicas[0], float(round_), choice.depth)
            router.completed(made.id, float(round_))
    return np.array(found)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--indexed", type=int, default=INDEXED, help="blocks")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md")
    arguments = parser.parse_args()
    lines = ["| | goal | median | p99 |", "|---|--:|--:|--:|"]
    for name, restart_points in (("full layers", False), ("layers of several kinds", True)):
        random = np.random.default_rng(0)
        router = Router(BLOCK_SIZE, draw=Random(0).random)
        for place in range(REPLICAS):
            router.add(str(place))
            load = ReplicaLoad(begin_s=float(random.random()), token_s=5e-5, num_running=int(random.integers(200)))
            router.report(str(place), load, 0.0)
        paths = filled(router, random, arguments.indexed, restart_points=restart_points)
        gc.freeze()
        for kind, some in (
            ("three replicas at most have some of the prompt", [keys for n, keys in enumerate(paths) if n % 4]),
            ("all 64 have some, each to another depth", paths[::4]),
        ):
            taken = times_us(router, some, arguments.rounds)
            goal = f"{GOAL_US} µs" if not restart_points else "–"
            lines.append(
                f"| a decision, {name}; {kind} | {goal} | {np.median(taken):.0f} µs | {np.percentile(taken, 99):.0f} µs |"
            )
        del router, paths
    tokens = np.random.default_rng(0).integers(0, 50_000, BLOCKS * BLOCK_SIZE + 1).astype(np.int32)
    keys_ms = []
    for _ in range(50):
        began = time.thread_time_ns()
        prompt_keys(tokens, BLOCK_SIZE)
        keys_ms.append((time.thread_time_ns() - began) / 1e6)
    lines.append(
        f"| keys of {len(tokens):,} tokens | {GOAL_KEYS_MS} ms | {np.median(keys_ms):.1f} ms | {np.percentile(keys_ms, 99):.1f} ms |"
    )
    text = "\n".join(
        [
            "# What a routing decision costs",
            "",
            f"{REPLICAS} replicas, {arguments.indexed:,} blocks indexed, prompts of {BLOCKS:,} blocks; CPU time of one thread of a busy machine, Python {platform.python_version()}, "
            "by `python benchmarks/routing_cost.py`.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
