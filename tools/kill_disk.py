"""Kill a process that uses a disk cache at random moments, and see what the next one finds; spoil objects, and see that
none is read.

    python tools/kill_disk.py --kills 1000 --corruptions 1000 --out benchmarks/results/disk.md

A killed round forks a process that opens the store, writes chains of blocks, looks up and reads; it tells by a pipe
what `flush` has seen written. It gets SIGKILL at a random moment, of the opening, too. Then the store is opened here:
each block that it gives has to be right to the last byte, and in rounds without eviction each block that was reported has
to be there.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.storage.disk_store import DiskStore
from paged.storage.object_file import HEADER_BYTES, VERSION, write_object

BLOCK_BYTES = 16_384
_CHAINS, _LENGTH = 40, 16
_LONGEST_S = 0.3
"""From the fork, or from the opening, to the kill."""
IDENTITY = sha256(b"a model").digest()


def key_of(chain: int, place: int) -> bytes:
    """The key of a block."""
    return sha256(b"%d %d" % (chain, place)).digest()


def block_of(key: bytes) -> NDArray[np.uint8]:
    """What this block holds: it follows from its key."""
    return np.frombuffer(random.Random(key).randbytes(BLOCK_BYTES), np.uint8)


def keys_of(chain: int) -> list[bytes]:
    """The keys of a chain."""
    return [key_of(chain, place) for place in range(_LENGTH)]


def copy_of(keys: list[bytes]) -> Callable[[list[int]], NDArray[np.uint8]]:
    """What a store asks for these keys."""
    return lambda places: np.stack([block_of(keys[place]) for place in places])


def opened(folder: Path, limit_blocks: int) -> DiskStore:
    """The store, with room for so many blocks."""
    limit = limit_blocks * (BLOCK_BYTES + HEADER_BYTES)
    return DiskStore(folder, limit_bytes=limit, block_bytes=BLOCK_BYTES, identity=IDENTITY)


def _load(folder: Path, limit_blocks: int, seed: int, reports: int) -> None:
    """Use the store until the end comes."""
    drawn = random.Random(seed)
    store = opened(folder, limit_blocks)
    os.write(reports, b"o")
    into = np.empty((_LENGTH, BLOCK_BYTES), np.uint8)
    while True:
        chains = [drawn.randrange(_CHAINS) for _ in range(drawn.choice([1, 4]))]
        for chain in chains:
            keys = keys_of(chain)
            found = store.look_up(keys)
            found = store.read(keys[:found], into)
            store.write(keys, copy_of(keys))
        if drawn.random() < 0.5:
            store.flush()
            # 40 chains are letters.
            os.write(reports, bytes(65 + chain for chain in chains))


class Killed:
    """What rounds of kills have shown."""

    def __init__(self) -> None:
        self.kills = self.in_opening = self.read = self.wrong = self.lost = self.reported = 0
        self.opening_s: list[float] = []
        self.most_over = 0

    def round(self, folder: Path, limit_blocks: int, drawn: random.Random) -> None:
        """Start one, kill it, and look."""
        ours, theirs = os.pipe()
        seed, begins_at_fork = drawn.random(), drawn.random() < 0.3
        child = os.fork()
        if not child:
            try:
                os.close(ours)
                _load(folder, limit_blocks, int(seed * 2**32), theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        first = b"" if begins_at_fork else os.read(ours, 1)
        time.sleep(drawn.random() * _LONGEST_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = first
        while part := os.read(ours, 65536):
            said += part
        os.close(ours)
        self.kills += 1
        self.in_opening += not said
        self._look(folder, limit_blocks, {byte - 65 for byte in said if byte != ord("o")})

    def _look(self, folder: Path, limit_blocks: int, reported: set[int]) -> None:
        began = time.perf_counter()
        store = opened(folder, limit_blocks)
        self.opening_s.append(time.perf_counter() - began)
        into = np.empty((1, BLOCK_BYTES), np.uint8)
        is_whole = limit_blocks >= _CHAINS * _LENGTH
        for chain in range(_CHAINS):
            for key in keys_of(chain):
                is_there = store.look_up([key]) and store.read([key], into)
                self.read += bool(is_there)
                self.wrong += bool(is_there) and not np.array_equal(into[0], block_of(key))
                if is_whole and chain in reported:
                    self.reported += 1
                    self.lost += not is_there
        # This finds what the killed one had not put into the index.
        store.flush()
        store.close()
        held = sum(1 for _ in (folder / "objects").glob("*/*"))
        self.most_over = max(self.most_over, held - limit_blocks)


def kill(num: int, folder: Path, seed: int) -> Killed:
    """So many rounds, of ten on one folder each; every other one with eviction."""
    drawn, found = random.Random(seed), Killed()
    for number in range(num):
        where = folder / f"kill-{number // 10}"
        found.round(where, _CHAINS * _LENGTH * 2 if number // 10 % 2 else 100, drawn)
        if number % 10 == 9:
            shutil.rmtree(where)
    return found


def _flip(path: Path, drawn: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, drawn: random.Random) -> None:
    os.truncate(path, drawn.randrange(path.stat().st_size))


def _lengthen(path: Path, drawn: random.Random) -> None:
    with path.open("ab") as file:
        file.write(drawn.randbytes(drawn.randrange(1, 100)))


def _swap(path: Path, drawn: random.Random) -> None:
    # Another one may have been given this one's content.
    own = path.read_bytes()
    other = drawn.choice([each for each in sorted(path.parent.parent.glob("*/*")) if each.read_bytes() != own])
    shutil.copyfile(other, path)


def _rewrite(path: Path, identity: bytes) -> None:
    data = np.frombuffer(path.read_bytes(), np.uint8)[HEADER_BYTES:].copy()
    path.unlink()
    write_object(path, identity, bytes.fromhex(path.name), data)


def _foreign(path: Path, drawn: random.Random) -> None:
    _rewrite(path, drawn.randbytes(32))


def _future(path: Path, drawn: random.Random) -> None:
    """A header of a later version whose checksum is right."""
    data = bytearray(path.read_bytes())
    data[8:12] = (VERSION + drawn.randrange(1, 100)).to_bytes(4, "little")
    end = HEADER_BYTES - 32
    data[end:HEADER_BYTES] = sha256(data[:end] + data[HEADER_BYTES:]).digest()
    path.write_bytes(data)


def _zero(path: Path, drawn: random.Random) -> None:
    """A page that never reached the disk."""
    data = bytearray(path.read_bytes())
    size = min(4096, len(data) // 2)
    start = drawn.randrange(0, len(data) - size)
    data[start : start + size] = bytes(size)
    path.write_bytes(data)


def _link(path: Path, drawn: random.Random) -> None:
    """The right bytes, elsewhere."""
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def _pipe(path: Path, drawn: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILERS = (_flip, _truncate, _lengthen, _swap, _foreign, _future, _zero, _link, _pipe)


def spoil(num: int, folder: Path, seed: int) -> dict[str, tuple[int, int]]:
    """Spoil an object in so many ways, and read it: by kind, how many were spoiled, and how many of those were misses.
    Raises AssertionError for a block that is not what was written."""
    drawn, found = random.Random(seed), dict.fromkeys((each.__name__[1:] for each in SPOILERS), (0, 0))
    store, into = opened(folder, 1000), np.empty((1, BLOCK_BYTES), np.uint8)
    keys = [key for chain in range(4) for key in keys_of(chain)]
    for number in range(num):
        store.write(keys, copy_of(keys))
        store.flush()
        spoiler, key = SPOILERS[number % len(SPOILERS)], drawn.choice(keys)
        assert store.look_up([key]) == store.read([key], into) == 1, "it is there"
        spoiler(store.path_of(key), drawn)
        num_read = store.read([key], into)
        assert not num_read or np.array_equal(into[0], block_of(key)), f"{spoiler.__name__}: wrong bytes were read"
        tried, missed = found[spoiler.__name__[1:]]
        found[spoiler.__name__[1:]] = tried + 1, missed + (not num_read)
    store.close()
    return found


def main(arguments: list[str] | None = None) -> None:
    """Do both, print a page, and exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to put the caches; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="a page of Markdown")
    asked = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="paged-disk-", dir=asked.folder))
    try:
        killed = kill(asked.kills, folder, asked.seed)
        spoiled = spoil(asked.corruptions, folder / "spoiled", asked.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    page = page_of(killed, spoiled)
    print(page)
    if asked.out is not None:
        asked.out.write_text(page)
    sys.exit(int(is_wrong(killed, spoiled)))


def is_wrong(killed: Killed, spoiled: dict[str, tuple[int, int]]) -> bool:
    """Whether a byte was wrong, a block lost, the limit passed, or a spoiled object read."""
    are_missed = all(tried == missed for tried, missed in spoiled.values())
    return killed.wrong > 0 or killed.lost > 0 or killed.most_over > 0 or not are_missed


def page_of(killed: Killed, spoiled: dict[str, tuple[int, int]]) -> str:
    """What was found, as a page."""
    rows: list[tuple[str, Any]] = [
        ("processes killed", f"{killed.kills:,}"),
        ("of those before the store was open", f"{killed.in_opening:,}"),
        ("blocks read afterwards", f"{killed.read:,}"),
        ("of those with a wrong byte", f"{killed.wrong:,}"),
        ("blocks reported as written, where nothing was evicted", f"{killed.reported:,}"),
        ("of those lost", f"{killed.lost:,}"),
        ("longest opening, ms", f"{max(killed.opening_s, default=0) * 1000:,.1f}"),
        (
            "most objects over the limit, once those were found that the index did not know",
            f"{max(killed.most_over, 0):,}",
        ),
    ]
    lines = [
        "# A disk cache under kill -9 and with spoiled objects",
        "",
        "`make disk`: processes that are killed at random moments, and objects that are spoiled.",
        "",
    ]
    lines += ["| | |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["| spoiled object | tried | misses |", "|---|--:|--:|"]
    lines += [f"| {name} | {tried:,} | {missed:,} |" for name, (tried, missed) in spoiled.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
