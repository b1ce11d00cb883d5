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

from paged.engine.replica_index import RESTART, Keys, prompt_keys
from paged.engine.routing import Prompt, ReplicaLoad, Router

REPLICAS, INDEXED, BLOCKS, BLOCK_SIZE = 64, 10_000_000, 6_250, 16
GOAL_US, GOAL_KEYS_MS = 200, 12
KINDS = ("three replicas at most have some of the prompt", "all 64 have some, each to another depth")


def filled(
    router: Router, random: np.random.Generator, indexed: int, *, restart_points: bool
) -> list[tuple[str, Keys]]:
    """Give replicas 10 million blocks in paths of 6,250. Return these, each with its kind: of every eighth all replicas have something."""
    paths = []
    for number in range(indexed // BLOCKS):
        keys, is_shared = random.integers(0, 1 << 63, BLOCKS, np.uint64), number % 8 == 0
        # Where its turns end, prompts can begin.
        stops = np.sort(random.integers(0, BLOCKS, 8))
        owners = [(number % REPLICAS, BLOCKS)]
        owners += [(place, int(random.integers(1, BLOCKS))) for place in range(REPLICAS if is_shared else number % 4)]
        for place, depth in owners:
            router.index.store(str(place), keys[:depth])
            if restart_points:
                router.index.store(str(place), keys[stops[stops < depth]], RESTART)
        paths.append((KINDS[is_shared], keys))
    return paths


def times_us(
    router: Router, paths: list[tuple[str, Keys]], rounds: int, random: np.random.Generator
) -> dict[str, list[float]]:
    """Microseconds of each decision, by kind. Before a path comes again all others have come: what it needs is in no cache of the processor."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for now in range(rounds):
        for number in random.permutation(len(paths)).tolist():
            kind, keys = paths[number]
            prompt = Prompt(f"{now}-{number}", keys, BLOCKS * BLOCK_SIZE)
            began = time.thread_time_ns()
            choice = router.choose(prompt, float(now))
            found[kind].append((time.thread_time_ns() - began) / 1e3)
            made = router.routed(prompt, choice.replicas[0], float(now), choice.depth)
            router.completed(made.id, float(now))
    return found


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--indexed", type=int, default=INDEXED, help="blocks")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md")
    arguments = parser.parse_args()
    lines = ["| | decisions | goal | median | p99 |", "|---|--:|--:|--:|--:|"]
    for name, restart_points in (("full layers", False), ("layers of several kinds", True)):
        random = np.random.default_rng(0)
        router = Router(BLOCK_SIZE, draw=Random(0).random)
        for place in range(REPLICAS):
            router.add(str(place))
            load = ReplicaLoad(begin_s=float(random.random()), token_s=5e-5, num_running=int(random.integers(200)))
            router.report(str(place), load, 0.0)
        paths = filled(router, random, arguments.indexed, restart_points=restart_points)
        gc.collect()
        gc.freeze()
        for kind, taken in times_us(router, paths, arguments.rounds, random).items():
            lines.append(
                f"| {name}; {kind} | {len(taken):,} | {GOAL_US} µs | {np.median(taken):.0f} µs | {np.percentile(taken, 99):.0f} µs |"
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
