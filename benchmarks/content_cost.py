"""What a host tier for content and events cost the scheduler: one stream of requests, with neither, either and both.

    python benchmarks/content_cost.py --rounds 9 --out benchmarks/results/content-cost.json

Log-normal prompts (mean 200) and outputs (mean 95) on 256 slots and a pool that evicts all the time; every block that is evicted goes to the
host, where it pushes another one out. Events are taken after every step; their content and hashes are for their reader: they are
read, and forgotten, every 64 steps while the clock stands, and that is timed apart.

CPU time of the process over all output tokens. The four take turns, round by round; they make the same decisions in every round, so of each
step the least over the rounds counts, and what else the machine did in the others does not; whole rounds stand beside it.
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


class Stream:
    """One stream of requests: what each step took, and reading its events."""

    def __init__(self, num_requests: int, host: bool, events: bool, num_blocks: int = 6_000) -> None:
        rng = np.random.default_rng(0)
        self.manager = BlockManager(num_blocks, 16, host_blocks=num_blocks if host else 0, host_caching=host)
        self.scheduler = Scheduler(self.manager, max_tokens_per_step=8192, max_sequences=256)
        self.requests = [
            Request(
                id=str(number),
                prompt=rng.integers(0, 30_000, max(1, int(rng.lognormal(5, 0.8)))).astype(np.int32),
                max_tokens=max(1, int(rng.lognormal(4.3, 0.7))),
            )
            for number in range(num_requests)
        ]
        self.events = events
        self.seconds: list[float] = []
        self.reading = 0.0
        self.num_outputs = self.num_hashes = 0

    def run(self) -> None:
        """All steps."""
        manager, scheduler, requests = self.manager, self.scheduler, self.requests
        taken: list[Any] = [manager.take_events()] if self.events else []
        num_added = 0
        while num_added < len(requests) or scheduler.has_unfinished:
            began = time.process_time()
            while num_added < len(requests) and scheduler.counts()["waiting"] < 16:
                scheduler.add(requests[num_added])
                num_added += 1
            batch = scheduler.schedule()
            count = int(batch.samples.sum())
            scheduler.update(batch, np.full(count, 7, np.int32))
            if self.events:
                taken.append(manager.take_events())
            stopped = time.process_time()
            self.seconds.append(stopped - began)
            self.num_outputs += count
            if len(taken) == STEPS_UNREAD:
                self.num_hashes += sum(len(getattr(event, "hashes", ())) for events in taken for event in events)
                taken.clear()
                self.reading += time.process_time() - stopped


def one_round(num_requests: int) -> dict[str, Stream]:
    """Each way once."""
    streams = {}
    for way, tiers in WAYS.items():
        streams[way] = Stream(num_requests, *tiers)
        streams[way].run()
    return streams


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler cost with content on the host, and with events.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--out", type=Path, default=None, help="write every round there, JSON")
    arguments = parser.parse_args()
    rounds = [one_round(arguments.requests) for _ in range(arguments.rounds)]
    num_outputs = rounds[0]["neither"].num_outputs
    least, totals = {}, {}
    for way in WAYS:
        seconds = np.array([streams[way].seconds for streams in rounds])
        least[way] = float(seconds.min(axis=0).sum()) / num_outputs * 1e6
        totals[way] = (seconds.sum(axis=1) / num_outputs * 1e6).tolist()
    for way, time_of_way in least.items():
        ratios = [of_way / of_neither for of_way, of_neither in zip(totals[way], totals["neither"], strict=True)]
        print(
            f"{way:8} {time_of_way:.3f} µs a token, {time_of_way / least['neither']:.2f} ×; whole rounds"
            f" {statistics.median(totals[way]):.3f}, {statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    reading = [streams["both"].reading / streams["both"].num_hashes * 1e6 for streams in rounds]
    print(f"reading: {statistics.median(reading):.2f} µs a block in an event, hash included")
    if arguments.out is not None:
        found = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "us_per_token": least,
            "us_per_token_by_round": totals,
            "us_per_hash_by_round": reading,
        }
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
