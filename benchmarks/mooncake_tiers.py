"""Mooncake's trace on a device that holds a tenth of its content: what a host tier saves, what it moves, and what an oracle would save.

    python benchmarks/mooncake_tiers.py mooncake_conversation.jsonl

Requests go one after another through `BlockManager` and `Scheduler`; each ends after one token and leaves its prompt in the cache. The
bound is Belady's: a cache of so many blocks that knows the future, evicts what is needed last, does not take in what is needed later
than all it has, and may hold a block without its prefix. No cache of that size finds more.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import BlockManager, Request, Scheduler
from paged.study.traces import read_trace
from paged.study.traces.trace import Trace

# K and V of one token of an 8B model: 2 · 32 layers · 8 heads · 128 · 2 bytes.
BYTES_PER_TOKEN = 131_072
NEVER = 2**62


class Cell(msgspec.Struct):
    """One run: sizes in blocks, everything else in tokens, but for bytes and seconds."""

    device_blocks: int
    host_blocks: int
    prompt_tokens: int
    hit_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    offloaded_bytes: int
    loaded_bytes: int
    belady_tokens: int
    seconds: float


def content_of(trace: Trace, block_size: int) -> NDArray[np.int64]:
    """The trace as one stream of content, request by request: a number for each full block that a lookup may find, the same for the same
    block after the same prefix. int64 [references]."""
    numbers: dict[bytes, int] = {}
    stream: list[int] = []
    for request in range(len(trace)):
        prompt, parent = np.asarray(trace.prompt(request), np.int32), 0
        for start in range(0, (len(prompt) - 1) // block_size * block_size, block_size):
            key = parent.to_bytes(8, "little") + prompt[start : start + block_size].tobytes()
            # 0 is the root.
            parent = numbers.setdefault(key, len(numbers) + 1)
            stream.append(parent)
    return np.array(stream, np.int64)


def belady_hits(stream: NDArray[np.int64], capacity: int) -> int:
    """References that a cache of `capacity` blocks which knows the future finds."""
    following = np.full(len(stream), NEVER, np.int64)
    last: dict[int, int] = {}
    for place in range(len(stream) - 1, -1, -1):
        block = int(stream[place])
        following[place] = last.get(block, NEVER)
        last[block] = place
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for block, after in zip(stream.tolist(), following.tolist(), strict=True):
        if block in held:
            hits += 1
        elif after == NEVER:
            continue
        elif len(held) >= capacity:
            while latest and held.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if latest and -latest[0][0] <= after:
                # What it has is all needed sooner.
                continue
            del held[heapq.heappop(latest)[1]]
        held[block] = after
        heapq.heappush(latest, (-after, block))
    return hits


def run(trace: Trace, block_size: int, device_blocks: int, host_blocks: int) -> Cell:
    """All requests, one after another."""
    manager = BlockManager(device_blocks, block_size, host_blocks=host_blocks, host_caching=host_blocks > 0)
    longest = int(trace.prompt_tokens.max())
    scheduler = Scheduler(manager, max_tokens_per_step=longest, max_sequences=1)
    started = time.perf_counter()
    for number in range(len(trace)):
        scheduler.add(Request(id=str(number), prompt=trace.prompt(number), max_tokens=1))
        while scheduler.has_unfinished:
            batch = scheduler.schedule()
            scheduler.update(batch, np.zeros(int(np.count_nonzero(batch.samples)), np.int32))
    seconds = time.perf_counter() - started
    figures = manager.stats()
    block_bytes = block_size * BYTES_PER_TOKEN
    return Cell(
        device_blocks,
        host_blocks,
        int(trace.prompt_tokens.sum()),
        figures.hit_tokens,
        figures.device_hit_tokens,
        figures.host_hit_tokens,
        figures.offloaded_blocks * block_bytes,
        figures.loaded_blocks * block_bytes,
        0,
        seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="A Mooncake trace on a tenth of its content, with and without a host.")
    parser.add_argument("trace", type=Path, help="a Mooncake trace, JSON Lines")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--limit", type=int, default=None, help="only the first so many requests")
    parser.add_argument("--out", type=Path, default=None, help="write the cells there, JSON")
    arguments = parser.parse_args()
    trace, size = read_trace(arguments.trace, limit=arguments.limit), arguments.block_size
    stream = content_of(trace, size)
    device_blocks = len(np.unique(stream)) // 10
    print(f"{len(trace):,} requests, {len(np.unique(stream)):,} different blocks of {size}, device {device_blocks:,}")
    cells = []
    for share in (0, 1, 2, 4, 9):
        cell = run(trace, size, device_blocks, share * device_blocks)
        cell.belady_tokens = belady_hits(stream, (1 + share) * device_blocks) * size
        cells.append(cell)
        print(
            f"host {share} × device: hits {cell.hit_tokens / cell.prompt_tokens:6.2%}"
            f" (device {cell.device_hit_tokens:,}, host {cell.host_hit_tokens:,} tokens),"
            f" Belady {cell.belady_tokens / cell.prompt_tokens:6.2%},"
            f" moved out {cell.offloaded_bytes / 2**40:.2f} TiB, in {cell.loaded_bytes / 2**40:.2f} TiB, {cell.seconds:.1f} s"
        )
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(cells), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
