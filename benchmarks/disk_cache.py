"""What a disk below memory costs and saves: to open it, to read a prefix in place of computing it, a step that neither
reads nor writes, and the decisions of steps that do.

    python benchmarks/disk_cache.py --model FOLDER --out benchmarks/results/disk_cache.md

Times of one thread are processor seconds, the least of several in turns; waits for a disk are wall-clock. Before a
prefix is read the page cache lets go of its files (posix_fadvise).
"""

from __future__ import annotations

import argparse
import os
import random
import sqlite3
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from paged import Batch, Engine, Hint, SamplingParams
from paged.storage.disk_store import DiskStore
from paged.testing.tiny_model import tiny_model

PREFIX = 2_320
_OBJECT = 16_384
_ROWS = 64


def opening(folder: Path, num_bytes: int) -> tuple[int, float, float]:
    """How many objects, and seconds of wall clock and of the processor to open a folder whose index has so many bytes
    of small objects; the objects themselves are not needed for that."""
    limit = {"limit_bytes": 2 * num_bytes, "block_bytes": _OBJECT, "identity": bytes(32)}
    DiskStore(folder, **limit).close()
    num = num_bytes // (_OBJECT + 120)
    with sqlite3.connect(folder / "index.sqlite") as index:
        rows = ((sha256(b"%d" % number).digest(), 1, _OBJECT + 120, number) for number in range(num))
        index.executemany("INSERT INTO objects (key, model, size, used) VALUES (?, ?, ?, ?)", rows)
    index.close()
    wall = used = float("inf")
    for _ in range(5):
        began, ran = time.perf_counter(), time.process_time()
        store = DiskStore(folder, **limit)
        wall, used = min(wall, time.perf_counter() - began), min(used, time.process_time() - ran)
        assert store.stats().held == num
        store.close()
    return num, wall, used


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, float, int]:
    """Wall-clock and processor seconds of all threads from a request to its first token, and its cached tokens."""
    engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    wall, used = time.perf_counter(), time.process_time()
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return time.perf_counter() - wall, time.process_time() - used, outputs[-1].usage.hit_tokens


def prefix(model: str, folder: Path, rounds: int) -> dict[str, tuple[float, float, int]]:
    """The first token of a prompt that is computed, of one that is read but for its last token, and of one that a hint had
    read before it was asked for: the least of so many."""
    blocks = -(-(PREFIX + 1) // 16) + 2
    options = {"num_blocks": blocks, "max_tokens_per_step": 512, "disk_cache": folder}
    found = dict.fromkeys(("computed", "read", "prefetched"), (float("inf"),) * 2 + (0,))
    prompts = [[(place * 7919 + nth * 31 + 5) % 40_000 + 10 for place in range(PREFIX + 1)] for nth in range(rounds)]
    for prompt in prompts:
        engine = Engine(model, **options)
        found["computed"] = min(found["computed"], first_token(engine, prompt))
        engine.close()
        drop_pages(folder)
        engine = Engine(model, **options)
        found["read"] = min(found["read"], first_token(engine, prompt))
        engine.close()
        drop_pages(folder)
        engine = Engine(model, **options)
        engine.hint(Hint(action="prefetch", tokens=prompt))
        while engine.has_unfinished:
            engine.step()
        found["prefetched"] = min(found["prefetched"], first_token(engine, prompt))
        engine.close()
    return found


def drop_pages(folder: Path) -> None:
    """Have the page cache let go of all objects."""
    for path in folder.glob("objects/*/*"):
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def idle(folder: Path, rounds: int) -> tuple[float, float]:
    """Processor seconds of the host's part of a decode of 64 rows without a disk, and what a disk adds to one that
    fills no block: two calls."""
    engine = Engine(
        tiny_model(128), num_blocks=1024, max_sequences=_ROWS, max_tokens_per_step=_ROWS * 8, disk_cache=folder,
        clock=time.thread_time,
    )  # fmt: skip
    assert engine.disk is not None, "it was asked for"
    for row in range(_ROWS):
        engine.add_request([row + 1] * 5, SamplingParams(max_tokens=200, ignore_eos=True))
    batches: list[Batch] = []
    engine.on_batch = batches.append
    host = added = float("inf")
    for _ in range(100):
        before = engine.stats().host_s
        engine.step()
        host = min(host, engine.stats().host_s - before)
    batch = next(each for each in reversed(batches) if (each.seq_lens % engine.manager.block_size).all())
    for _ in range(rounds):
        used = time.thread_time()
        for _ in range(1000):
            engine.disk.take_arrived()
            engine.disk.keep(batch, 0.001)
        added = min(added, (time.thread_time() - used) / 1000)
    return host, added


def busy(folder: Path | None, share: float) -> tuple[float, float]:
    """p50 and p99 of the processor seconds of `schedule`, of 800 prompts of 60 to 199 tokens, all new, or of the second half a
    `share` sent before, which memory or the disk has. A batch of prompts fills some blocks of 16 in every step."""
    disk = {} if folder is None else {"disk_cache": folder}
    engine = Engine(
        tiny_model(128), num_blocks=1024, max_sequences=_ROWS, max_tokens_per_step=512, clock=time.thread_time, **disk
    )
    draws, prompts = random.Random(1), list[list[int]]()
    for nth in range(800):
        is_sent = nth >= 400 and draws.random() < share
        new = [draws.randrange(1, 127) for _ in range(draws.randrange(60, 200))]
        prompts.append(prompts[draws.randrange(nth)] if is_sent else new)
    seconds, schedule = list[float](), engine.scheduler.schedule

    def timed(*given: Any, **more: Any) -> Batch:
        began = time.thread_time()
        batch = schedule(*given, **more)
        seconds.append(time.thread_time() - began)
        return batch

    engine.scheduler.schedule = timed  # type: ignore[method-assign]
    num_live = 0
    while prompts or engine.has_unfinished:
        while prompts and num_live < _ROWS + 8:
            engine.add_request(prompts.pop(0), SamplingParams(max_tokens=draws.randrange(10, 50), ignore_eos=True))
            num_live += 1
        num_live -= sum(output.finish_reason is not None for output in engine.step())
    engine.close()
    # The first steps fill an empty pool.
    p50, p99 = np.percentile(seconds[50:], (50, 99))
    return float(p50), float(p99)


def main() -> None:
    """Measure, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint for the prefix; none: it is left out")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of small objects, for the opening")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paged-disk-", dir=asked.folder) as where:
        rows: list[tuple[str, str]] = []
        num, wall, used = opening(Path(where) / "opening", int(asked.gigabytes * 1e9))
        rows.append(
            (
                f"open {asked.gigabytes:g} GB, {num:,} objects of 16 kB, s of wall clock; of the processor",
                f"{wall:.2f}; {used:.2f}",
            )
        )
        host, added = idle(Path(where) / "idle", 4 * asked.rounds)
        rows.append(
            (
                "the host's part of a decode of 64 rows, µs; what a disk adds that neither reads nor writes",
                f"{host * 1e6:.0f}; {added * 1e6:.1f} ({1 + added / host:.3f} ×)",
            )
        )
        for share in (0.0, 0.5):
            pairs = []
            for nth in range(asked.rounds):
                # In turns, and each first as often as the other.
                both = [None, Path(where) / f"busy-{share}-{nth}"]
                found_of = {each: busy(each, share) for each in (reversed(both) if nth % 2 else both)}
                pairs.append([found_of[each] for each in both])
            p50, p99 = np.moveaxis(np.array(pairs), 2, 0)
            shown = [
                f"{its[:, 0].min() * 1e6:.0f}, {its[:, 1].min() * 1e6:.0f} ({np.median(ratios := its[:, 1] / its[:, 0]):.2f} ×, "
                f"{ratios.min():.2f} to {ratios.max():.2f})"
                for its in (p50, p99)
            ]
            rows.append(
                (
                    f"`schedule` under load, {share:.0%} of the later prompts sent before, µs without and with a disk that is written "
                    f"and read, least of {asked.rounds} runs, and ratios of pairs: p50; p99",
                    "; ".join(shown),
                )
            )
        if asked.model:
            found = prefix(asked.model, Path(where) / "prefix", asked.rounds)
            for name, (wall, used, cached) in found.items():
                rows.append(
                    (f"first token of {PREFIX + 1:,}, {name} ({cached:,} cached), s of wall clock", f"{wall:.3f}")
                )
                rows.append((f"the same, {name}, s of all threads", f"{used:.3f}"))
            ratio = found["computed"][0] / found["read"][0], found["computed"][1] / found["read"][1]
            rows.append(
                ("read instead of computed, times faster: wall clock; processor", f"{ratio[0]:.1f}; {ratio[1]:.1f}")
            )
    page = "\n".join(
        ["# A disk below memory", "", "| | |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows), ""]
    )
    print(page)
    if asked.out is not None:
        asked.out.write_text(page)


if __name__ == "__main__":
    main()
