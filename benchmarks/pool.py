"""Time and bytes of a block pool, ours or vLLM's, in the same calls: build, allocate, insert content, free, evict.

The scenario is the one by which `vllm_sched.py` measures vLLM's pool: build it, allocate every block, give each one content,
free all, allocate all again, which evicts every content. There each phase is one call for the whole pool; here blocks come
and go in calls of 64 that are one run each, on both sides, as a sequence of 1,024 tokens takes and returns them.

What an insertion includes differs, and not in our favour: vLLM's enters a block under a digest that is already there (the
figure with a digest of eight bytes computed on the way, as its own scenario has it, stands beside it), ours reads the
run's tokens out of the row, keeps them and the block ids, and finds that no other row has them.

Bytes are tracemalloc's, in a process of their own, because tracing slows the clock. RSS is reported beside them.

    python benchmarks/pool.py --side ours --blocks 1000000
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
# Blocks a call: one sequence of 1,024 tokens.
CALL = 64
# Rows whose content is inserted under one reading of the clock, which itself costs as much as a few blocks do.
ROWS_AT_ONCE = 256
RUN_LENGTHS = (1, 4, 16)
clock = time.thread_time


def rss() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traced() -> int:
    """Bytes that Python and numpy hold, by tracemalloc."""
    return tracemalloc.get_traced_memory()[0]


class OurPool:
    """The device pool and prefix index of a `BlockManager`, without the rows' bookkeeping around them."""

    def __init__(self, num_blocks: int) -> None:
        from paged.block_manager.content_key import root_prefix
        from paged.block_manager.flights import Flights
        from paged.block_manager.pool import Pool
        from paged.block_manager.prefix_index import PrefixIndex
        from paged.block_manager.tables import Tables

        self.tables = Tables(BLOCK_SIZE, num_rows=ROWS_AT_ONCE)
        self.pool = Pool(num_blocks, "device")
        host = Pool(0, "host")
        self.index = PrefixIndex(self.tables, Flights(), self.pool, host, host_gives_way=False)
        self.root = root_prefix(None)
        self.next_token = 0

    def allocate(self, calls: int, count: int) -> list[Any]:
        """`calls` times `count` blocks."""
        draw = self.pool.draw
        return [draw(count) for _ in range(calls)]

    def insert(self, held: list[Any]) -> float:
        """Give each array of blocks the content of a row of its own; returns the CPU seconds of that alone."""
        seconds = 0.0
        for first in range(0, len(held), ROWS_AT_ONCE):
            rows = [self._row_that_holds(blocks) for blocks in held[first : first + ROWS_AT_ONCE]]
            start = clock()
            for row in rows:
                self.index.open_path(row, self.root)
                self.index.publish(row)
                self.index.close_run(row)
            seconds += clock() - start
            for row in rows:
                self.index.release_path(row)
                self.tables.close(row)
        return seconds

    def free(self, held: list[Any]) -> None:
        """Give every array of blocks back in a call of its own."""
        release = self.pool.release
        for blocks in held:
            release(blocks)

    def _row_that_holds(self, blocks: Any) -> int:
        import numpy as np

        num_tokens = len(blocks) * BLOCK_SIZE
        tokens = np.arange(self.next_token, self.next_token + num_tokens, dtype=np.int32)
        self.next_token += num_tokens
        row = self.tables.open(tokens)
        self.tables.blocks[0, row, : len(blocks)] = blocks
        self.tables.num_blocks[row] = len(blocks)
        self.tables.set_progress(row, num_tokens, num_tokens)
        return row


class VllmPool:
    """vLLM's BlockPool. Block 0 is its null block and never handed out, so it is built with one more."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.pool = BlockPool(num_gpu_blocks=num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
        self.key = make_block_hash_with_group_id
        self.with_digest = False

    def allocate(self, calls: int, count: int) -> list[Any]:
        """`calls` times `count` blocks."""
        take = self.pool.get_new_blocks
        return [take(count) for _ in range(calls)]

    def insert(self, held: list[Any]) -> float:
        """Enter every block under a key of its own; returns the CPU seconds of that alone."""
        key, enter, digest = self.key, self.pool._insert_block_hash, hashlib.sha256
        seconds = 0.0
        for blocks in held:
            if self.with_digest:
                start = clock()
                for block in blocks:
                    found = key(digest(block.block_id.to_bytes(8, "big")).digest(), 0)
                    enter(found, block, num_tokens=BLOCK_SIZE)
            else:
                keys = [key(digest(block.block_id.to_bytes(8, "big")).digest(), 0) for block in blocks]
                start = clock()
                for found, block in zip(keys, blocks, strict=True):
                    enter(found, block, num_tokens=BLOCK_SIZE)
            seconds += clock() - start
        return seconds

    def free(self, held: list[Any]) -> None:
        """Give every list of blocks back, tail first, in a call of its own."""
        release = self.pool.free_blocks
        for blocks in held:
            release(reversed(blocks))


SIDES: dict[str, Callable[[int], Any]] = {"ours": OurPool, "vllm": VllmPool}


def load(side: str) -> None:
    """Import the side and build a small pool, so that no import is timed or weighed."""
    small = SIDES[side](4 * CALL)
    small.insert(small.allocate(2, CALL))


def times(side: str, num_blocks: int, with_digest: bool) -> dict[str, float]:
    """CPU time of each phase, and RSS at rest and full of content."""
    load(side)
    gc.collect()
    rss_before, start = rss(), clock()
    pool = SIDES[side](num_blocks)
    build = clock() - start
    rss_at_rest = rss()
    if with_digest:
        pool.with_digest = True
    # As vLLM's engine core does once it stands: the collector looks at none of this again.
    gc.collect()
    gc.freeze()
    calls = num_blocks // CALL
    blocks = calls * CALL
    start = clock()
    held = pool.allocate(calls, CALL)
    allocate = clock() - start
    insert = pool.insert(held)
    start = clock()
    pool.free(held)
    free = clock() - start
    del held
    rss_full = rss()
    start = clock()
    pool.allocate(calls, CALL)
    evict = clock() - start
    return {
        "build_ms": build * 1e3,
        "allocate_ns": allocate / blocks * 1e9,
        "insert_ns": insert / blocks * 1e9,
        "free_ns": free / blocks * 1e9,
        "evict_and_allocate_ns": evict / blocks * 1e9,
        "rss_at_rest_bytes": (rss_at_rest - rss_before) / num_blocks,
        "rss_full_bytes": (rss_full - rss_before) / num_blocks,
    }


def weights(side: str, num_blocks: int, run_length: int) -> dict[str, float]:
    """Bytes a block at rest, and with every block cached as content in runs of `run_length`, by tracemalloc."""
    load(side)
    gc.collect()
    tracemalloc.start()
    before = traced()
    pool = SIDES[side](num_blocks)
    at_rest = traced() - before
    held = pool.allocate(num_blocks // run_length, run_length)
    pool.insert(held)
    pool.free(held)
    del held
    gc.collect()
    return {"at_rest_bytes": at_rest / num_blocks, "full_bytes": (traced() - before) / num_blocks}


def measured(side: str, num_blocks: int) -> dict[str, Any]:
    """One run of everything, each part in a process of its own."""

    def part(*options: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--side", side, "--blocks", str(num_blocks), *options]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command[1:])} failed:\n{run.stderr[-2000:]}")
        result: dict[str, float] = json.loads(run.stdout.strip().splitlines()[-1])
        return result

    result: dict[str, Any] = part("--part", "times")
    if side == "vllm":
        result["insert_with_digest_ns"] = part("--part", "times", "--digest")["insert_ns"]
    # A vLLM block is weighed by itself: it knows no runs.
    weighed = {
        length: part("--part", "weights", "--run", str(length)) for length in RUN_LENGTHS[: 3 if side == "ours" else 1]
    }
    result["at_rest_bytes"] = weighed[RUN_LENGTHS[0]]["at_rest_bytes"]
    result["full_bytes"] = {str(length): weight["full_bytes"] for length, weight in weighed.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, default="ours")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the pool (default 1000000)")
    parser.add_argument("--part", choices=("times", "weights"), help=argparse.SUPPRESS)
    parser.add_argument("--run", type=int, default=CALL, help=argparse.SUPPRESS)
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "times":
        print(json.dumps(times(args.side, args.blocks, args.digest)))
    elif args.part == "weights":
        print(json.dumps(weights(args.side, args.blocks, args.run)))
    else:
        print(json.dumps(measured(args.side, args.blocks)))


if __name__ == "__main__":
    main()
