"""An index of a folder in SQLite: the model of each object, its size, and when it was last used.

The objects are the truth, and the index is a cache of it: a sweep finds an object without a row, and a miss removes a
row without an object. So the index may be lost, and no write of it is synced.

It has a write-ahead log, not a rollback journal: a commit appends to one file and syncs none (`synchronous=NORMAL`),
delays no reader of another process, and the next process replays the log after kill -9. The log needs memory shared by
all processes, so one machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_SCHEMA_VERSION = 1
_BUSY_S = 5.0
"""Most time to wait for another process's commit."""
_CACHE_KIB = 8192
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS models (id INTEGER PRIMARY KEY, identity BLOB NOT NULL UNIQUE, words TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, model INTEGER NOT NULL, size INTEGER NOT NULL,
    used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON objects (used);
CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY CHECK (id = 0), bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO totals VALUES (0, 0);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON objects BEGIN UPDATE totals SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON objects BEGIN UPDATE totals SET bytes = bytes - OLD.size; END;
PRAGMA user_version = 1;
COMMIT;
"""


class FutureIndex(Exception):
    """The index is of a newer version of paged."""


class Row(NamedTuple):
    """An object: its key, 32 bytes; its model's number; the file's bytes; its last use, in nanoseconds since the epoch."""

    key: bytes
    model: int
    size: int
    used: int


class Index:
    """The index of a folder, for one thread. Each call is one transaction, and may raise sqlite3.Error.

    Raises FutureIndex, and sqlite3.DatabaseError for a file that is broken anywhere.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > _SCHEMA_VERSION:
                raise FutureIndex(version)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            if version < _SCHEMA_VERSION:
                self._db.executescript(_SCHEMA)
            # It reads all pages: every write that met a broken one would fail.
            if (problem := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(problem)
        except BaseException:
            self._db.close()
            raise
        # The largest number of a row that was read.
        self._seen = 0

    def model(self, identity: bytes, words: str) -> int:
        """Return the number of an identity; add it if it is new."""
        self._db.execute("INSERT OR IGNORE INTO models (identity, words) VALUES (?, ?)", (identity, words))
        found: int = self._db.execute("SELECT id FROM models WHERE identity = ?", (identity,)).fetchone()[0]
        return found

    def new_keys(self, model: int) -> set[bytes]:
        """Return the keys of a model's objects that any process added since the last call; the first call returns all."""
        with closing(self._db.execute("SELECT coalesce(max(number), 0) FROM objects")) as newest:
            last = newest.fetchone()[0]
        if last <= self._seen:
            return set()
        asked = "SELECT key FROM objects WHERE number > ? AND number <= ? AND model = ?"
        # Without a step of Python a row: there may be half a million.
        found = set(chain.from_iterable(self._db.execute(asked, (self._seen, last, model))))
        self._seen = last
        return found

    def add(self, rows: Sequence[Row]) -> None:
        """Add objects; known ones count as used."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT INTO objects (key, model, size, used) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET used = max(used, excluded.used)",
                rows,
            )

    def use(self, uses: Sequence[tuple[int, bytes]]) -> None:
        """Note when objects were used."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("UPDATE objects SET used = max(used, ?) WHERE key = ?", uses)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove objects."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def make_room(self, limit: int, size: int) -> list[bytes]:
        """Remove the least recently used objects until `size` bytes more stay within the limit. Return their keys."""
        if self.total() + size <= limit:
            return []
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            # Again, now that no other process can write.
            over, gone = self.total() + size - limit, list[bytes]()
            with closing(self._db.execute("SELECT key, size FROM objects ORDER BY used")) as oldest:
                for key, its in oldest:
                    if over <= 0:
                        break
                    over -= its
                    gone.append(key)
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in gone])
        return gone

    def total(self) -> int:
        """Return the bytes of all objects, of every model."""
        found: int = self._db.execute("SELECT bytes FROM totals").fetchone()[0]
        return found

    def has(self, key: bytes) -> bool:
        """Whether an object is known."""
        return self._db.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone() is not None

    def close(self) -> None:
        self._db.close()
