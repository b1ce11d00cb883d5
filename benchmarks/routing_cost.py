"""What a routing decision costs on the host: keys of a prompt, and a choice among replicas. `results/routing-cost.md`.

    python benchmarks/routing_cost.py --out benchmarks/results/routing-cost

64 replicas, 10 million blocks indexed, prompts of 6,250 blocks. CPU seconds of one thread. What the page says from its first heading `##` on stays.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import time
from pathlib import Path
from random import Random

import numpy as np

from paged.engine.replica_index import RESTART, Keys, prompt_keys
from paged.engine.routing import Prompt, ReplicaLoad, Router, RoutingRules
from paged.model.machine import machine

REPLICAS, INDEXED, BLOCKS, BLOCK_SIZE, PASSES = 64, 10_000_000, 6_250, 16, 3
GOAL_US, GOAL_KEYS_MS = 200, 12
KINDS = ("three replicas at most have some of the prompt", "all 64 have some, each to another depth")
LOOP = "for comparison, a sum of 8,000 numbers, in turn with the decisions"


def filled(
    router: Router, random: np.random.Generator, indexed: int, *, restart_points: bool
) -> list[tuple[str, Keys]]:
    """Give replicas 10 million blocks in paths of 6,250. Return these, each with its kind: of every sixteenth all replicas have something."""
    paths = []
    for number in range(indexed // BLOCKS):
        keys, is_shared = random.integers(0, 1 << 63, BLOCKS, np.uint64), number % 16 == 0
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


def times_us(router: Router, paths: list[tuple[str, Keys]], random: np.random.Generator) -> dict[str, list[float]]:
    """Microseconds of each decision, by kind. Before a path comes again all others have come: what it needs is in few caches of the processor."""
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, LOOP)}
    for number in np.concatenate([random.permutation(len(paths)) for _ in range(PASSES)]).tolist():
        kind, keys = paths[number]
        # A prompt's keys were just made.
        prompt = Prompt(str(number), keys.copy(), BLOCKS * BLOCK_SIZE)
        began = time.thread_time_ns()
        sum(range(8_000))
        found[LOOP].append((time.thread_time_ns() - began) / 1e3)
        began = time.thread_time_ns()
        choice = router.choose(prompt, 0.0)
        found[kind].append((time.thread_time_ns() - began) / 1e3)
        made = router.routed(prompt, choice.replicas[0], 0.0, choice.depth)
        router.completed(made.id, 0.0)
    return found


def busy_s() -> float:
    """Seconds for which the processors have computed, on Linux."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    return sum(map(int, first.split()[1:4])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--indexed", type=int, default=INDEXED, help="blocks")
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md")
    arguments = parser.parse_args()
    lines = ["| a decision | decisions a run | goal, p99 | median | p99 of each run |", "|---|--:|--:|--:|--:|"]
    start, busy, own = time.monotonic(), busy_s(), time.process_time()
    for name, restart_points in (("full layers", False), ("layers of several kinds", True)):
        random = np.random.default_rng(0)
        router = Router(BLOCK_SIZE, RoutingRules(settle_s=0.0), draw=Random(0).random)
        for place in range(REPLICAS):
            router.add(str(place))
            load = ReplicaLoad(begin_s=float(random.random()), token_s=5e-5, num_running=int(random.integers(200)))
            router.report(str(place), load, 0.0)
        paths = filled(router, random, arguments.indexed, restart_points=restart_points)
        gc.collect()
        gc.freeze()
        runs = [times_us(router, paths, random) for _ in range(arguments.runs)]
        for kind in (*KINDS, LOOP):
            each = [run[kind] for run in runs]
            tails = ", ".join(f"{np.percentile(taken, 99):.0f}" for taken in each)
            lines.append(
                f"| {name}; {kind} | {len(each[0]):,} | {'–' if kind == LOOP else f'{GOAL_US} µs'} | {np.median(each):.0f} µs | {tails} µs |"
            )
        del router, paths
    tokens = np.random.default_rng(0).integers(0, 50_000, BLOCKS * BLOCK_SIZE + 1).astype(np.int32)
    keys_ms = []
    for _ in range(50):
        began = time.thread_time_ns()
        prompt_keys(tokens, BLOCK_SIZE)
        keys_ms.append((time.thread_time_ns() - began) / 1e6)
    others = (busy_s() - busy - (time.process_time() - own)) / (time.monotonic() - start)
    here = machine()
    text = "\n".join(
        [
            "# What a routing decision costs",
            "",
            f"{REPLICAS} replicas, {arguments.indexed:,} blocks indexed, prompts of {BLOCKS:,} blocks that are asked for in turn, so that their blocks are in few caches; CPU time "
            f"of one thread; {here['processor']}, {here['cores']} processors, Python {platform.python_version()}; other programs used {others:.1f} processors meanwhile. By `python "
            "benchmarks/routing_cost.py`.",
            "",
            *lines,
            "",
            f"Keys of {len(tokens):,} tokens: {np.median(keys_ms):.1f} ms, p99 {np.percentile(keys_ms, 99):.1f} ms (goal {GOAL_KEYS_MS} ms).",
            "",
        ]
    )
    print(text)
    if arguments.out is not None:
        page = arguments.out.with_suffix(".md")
        _, heading, rest = page.read_text(encoding="utf-8").partition("\n## ") if page.exists() else ("", "", "")
        page.write_text(text + heading + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
