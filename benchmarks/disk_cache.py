"""What a disk below memory costs and saves: to open it, to read a prefix in place of computing it, and a step that neither reads nor writes.

    python benchmarks/disk_cache.py --model FOLDER --out benchmarks/results/disk_cache.md

Times of one thread are processor seconds, the least of several in turns; waits for a disk are wall-clock. Before a prefix is read the page cache lets go of
its files (posix_fadvise).
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path

from paged import Engine, SamplingParams
from paged.storage.disk_store import DiskStore
from paged.testing.tiny_model import tiny_model

PREFIX = 2_320
_OBJECT = 16_384
_ROWS, _STEPS = 64, 60


def opening(folder: Path, num_bytes: int) -> tuple[int, float, float]:
    """How many objects, and seconds of wall clock and of the processor to open a folder whose index has so many bytes of small objects; the objects themselves are not needed for that."""
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
    """The first token of a prompt that is computed, and of one that is read but for its last token: the least of so many."""
    blocks = -(-(PREFIX + 1) // 16) + 2
    options = {"num_blocks": blocks, "max_tokens_per_step": 512, "disk_cache": folder}
    found = {"computed": (float("inf"),) * 2 + (0,), "read": (float("inf"),) * 2 + (0,)}
    prompts = [[(place * 7919 + nth * 31 + 5) % 40_000 + 10 for place in range(PREFIX + 1)] for nth in range(rounds)]
    for prompt in prompts:
        engine = Engine(model, **options)
        found["computed"] = min(found["computed"], first_token(engine, prompt))
        engine.close()
        drop_pages(folder)
        engine = Engine(model, **options)
        found["read"] = min(found["read"], first_token(engine, prompt))
        engine.close()
    return found


def drop_pages(folder: Path) -> None:
    """Have the page cache let go of all objects."""
    for path in folder.glob("objects/*/*"):
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def step_seconds(folder: Path | None, block_size: int) -> Callable[[], float]:
    """An engine that decodes 64 rows: processor seconds of its thread a step, call by call."""
    engine = Engine(
        tiny_model(1024), block_size=block_size, num_blocks=_ROWS * 256 // block_size, max_sequences=_ROWS, max_tokens_per_step=_ROWS * 8,
        **({} if folder is None else {"disk_cache": folder}),
    )  # fmt: skip

    rounds = count()

    def once() -> float:
        nth = next(rounds)
        for row in range(_ROWS):
            engine.add_request(
                [row + _ROWS * (nth % 8)] * (5 + nth // 8),
                SamplingParams(max_tokens=_STEPS + 8, ignore_eos=True),
                id=f"{row}",
            )
        for _ in range(4):
            engine.step()
        used = time.thread_time()
        for _ in range(_STEPS):
            engine.step()
        used = time.thread_time() - used
        while engine.has_unfinished:
            engine.step()
        engine.manager.reset_cache()
        return used / _STEPS

    return once


def idle(folder: Path, rounds: int, block_size: int) -> tuple[float, float]:
    """Seconds a step without a disk and with one; blocks larger than a sequence are never full."""
    import torch

    torch.set_num_threads(1)
    without, on_disk = step_seconds(None, block_size), step_seconds(folder, block_size)
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        best = [min(best[0], without()), min(best[1], on_disk())]
    return best[0], best[1]


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
        for name, block_size in (("neither reads nor writes", 256), ("writes each block of 16 that fills", 16)):
            plain, tiered = idle(Path(where) / f"idle-{block_size}", 4 * asked.rounds, block_size)
            rows.append(
                (
                    f"a step of 64 rows of a tiny decoder without a disk, {block_size} tokens a block, µs of its thread",
                    f"{plain * 1e6:,.0f}",
                )
            )
            rows.append((f"the same with one that {name}, µs", f"{tiered * 1e6:,.0f} ({tiered / plain:.3f} ×)"))
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
