"""What a host tier for content and events cost the scheduler: one stream of requests, with neither, either and both.

    python benchmarks/content_cost.py --rounds 5 --out benchmarks/results/content-cost.json

Log-normal prompts (mean 200) and outputs (mean 95) on 256 slots and a pool that evicts all the time; every block that is evicted goes to the
host, where it pushes another one out. Events are taken after every step; what they are and their hashes is for whoever reads them: they are read,
and forgotten, every 64 steps while the clock stands, and that is timed apart. CPU time of the process over all output tokens; the four take turns.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paged import BlockManager, Request, Scheduler

STEPS_UNREAD = 64
WAYS = {"neither": (False, False), "host": (True, False), "events": (False, True), "both": (True, True)}


def run(num_requests: int, host: bool, events: bool, num_blocks: int = 6_000) -> tuple[float, float]:
    """(µs an output token, µs an event that is read) of one stream."""
    rng = np.random.default_rng(0)
    manager = BlockManager(num_blocks, 16, host_blocks=num_blocks if host else 0, host_caching=host)
    scheduler = Scheduler(manager, max_tokens_per_step=8192, max_sequences=256)
    requests = [
        Request(
            id=str(number),
            prompt=rng.integers(0, 30_000, max(1, int(rng.lognormal(5, 0.8)))).astype(np.int32),
            max_tokens=max(1, int(rng.lognormal(4.3, 0.7))),
        )
        for number in range(num_requests)
    ]
    taken = [manager.take_events()] if events else []
    num_outputs = num_added = num_hashes = 0
    spent = reading = 0.0
    began = time.process_time()
    while num_added < num_requests or scheduler.has_unfinished:
        while num_added < num_requests and scheduler.num_waiting < 16:
            scheduler.add(requests[num_added])
            num_added += 1
        batch = scheduler.schedule()
        count = int(batch.samples.sum())
        scheduler.update(batch, np.full(count, 7, np.int32))
        num_outputs += count
        if events:
            taken.append(manager.take_events())
        if len(taken) == STEPS_UNREAD:
            stopped = time.process_time()
            num_hashes += num_hashes_of(taken)
            taken.clear()
            spent += stopped - began
            began = time.process_time()
            reading += began - stopped
    spent += time.process_time() - began
    return spent / num_outputs * 1e6, reading / num_hashes * 1e6 if num_hashes else 0.0


def num_hashes_of(taken: list[Any]) -> int:
    """Blocks that these events name."""
    return sum(len(getattr(event, "hashes", ())) for events in taken for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler cost with content on the host, and with events.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--out", type=Path, default=None, help="write every run there, JSON")
    arguments = parser.parse_args()
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    reading: list[float] = []
    for _ in range(arguments.rounds):
        for way, (host, events) in WAYS.items():
            spent, read = run(arguments.requests, host, events)
            runs[way].append(spent)
            if way == "events":
                reading.append(read)
    base = statistics.median(runs["neither"])
    for way, times in runs.items():
        middle = statistics.median(times)
        print(f"{way:8} {middle:.3f} µs a token ({min(times):.3f} to {max(times):.3f}), {middle / base:.2f} ×")
    print(f"reading: {statistics.median(reading):.2f} µs a block that is told, hash included")
    if arguments.out is not None:
        found = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "us_per_token": runs,
            "us_per_hash": reading,
        }
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
