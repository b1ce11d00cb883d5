"""A store of blocks in a folder: bounded, checked at each read, and consistent after kill -9.

    step's thread     look_up ── a set of keys          write ── copies ──> queue, bounded in bytes
    another thread    read ── file, checksum
    the writer        queue ──> room, file, fsync, rename ──> a row of the index           uses, misses ──> index

The step's thread touches no file and no index. When a process is killed, only content that was not written yet is lost.
"""

from __future__ import annotations

import errno
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Condition, Lock, Thread

import numpy as np
from numpy.typing import NDArray

from paged.base.budget import as_bytes
from paged.errors import BudgetTooSmall, UnusableStore
from paged.storage.folder import KEY_BYTES, Folder
from paged.storage.index import FutureIndex, Index, Row
from paged.storage.object_file import (
    HEADER_BYTES,
    VERSION,
    Corrupt,
    read_header,
    read_object,
    sync_object,
    write_object,
)
from paged.storage.store import Blocks, Copy, StoreStats

QUEUE_BYTES = 256 * 2**20
"""Limit on blocks that are taken and not written yet."""
_MOST_USES = 65_536
"""Limit on uses that the index does not have yet; the oldest ones beyond it are lost."""
_BATCH_BYTES, _BATCH_BLOCKS = 64 * 2**20, 256
"""Limits of a transaction."""
_IDLE_S = 1.0
"""Between two readings of what other processes wrote."""
_GRACE_NS = 60 * 10**9
"""A younger object without a row may be another process's, which has not written the row yet."""
_SWEEP_S = 0.02
"""Between two folders of a sweep."""
_CLOSING_S = 10.0
_READERS, _LARGE_BYTES = 4, 2**17
"""Threads that read blocks of at least so many bytes: while one waits for the disk, others hash."""
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}
"""Errors of a read that are the process's, not the object's."""

_Opened = tuple[Index, int, set[bytes]]
"""An index, this model's number in it, and the names of this model's objects."""
_Taken = tuple[bytes, NDArray[np.uint8]]
"""An object's name, and its block, which waits for the writer."""


class DiskStore:
    """Blocks of `block_bytes` bytes in a folder of at most `limit_bytes` with headers, and what is being written.

    identity  32 bytes, equal for engines whose blocks are equal bit by bit. Objects of other identities in the folder are
              never read; they are evicted as any other, the least recently used first
    words     what the identity stands for, for people

    Raises UnusableStore (as Folder, or a newer index), and BudgetTooSmall for a limit below one block.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        limit_bytes: int,
        block_bytes: int,
        identity: bytes,
        words: str = "",
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        object_bytes = block_bytes + HEADER_BYTES
        if limit_bytes < object_bytes:
            raise BudgetTooSmall(
                f"a disk cache of {as_bytes(limit_bytes)} does not hold one block, which takes {as_bytes(object_bytes)}.",
                wanted=object_bytes,
                given=limit_bytes,
            )
        self._identity = sha256(VERSION.to_bytes(4, "little") + identity).digest()
        folder = Folder(Path(path))
        try:
            opened = _opened(folder, self._identity, words)
            self._writer = _Writer(folder, opened, self._identity, limit_bytes, object_bytes, queue_bytes)
        except BaseException:
            folder.close()
            raise
        self._folder = folder
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="paged-disk-store")
        # At its end a process writes what is queued.
        self._end = weakref.finalize(self, _Writer.stop, self._writer)
        self._writer.start()

    def look_up(self, keys: Sequence[bytes]) -> int:
        """As BlockStore.look_up. About 1 µs a block."""
        held, found = self._writer.held, list[bytes]()
        for key in keys:
            name = self._name(key)
            if name not in held:
                break
            found.append(name)
        if found:
            self._writer.note_use(found)
        return len(found)

    def read(self, keys: Sequence[bytes], into: Blocks) -> int:
        """As BlockStore.read; several at once if they are large."""
        is_open = self._end.alive
        run = self._readers.map if is_open and into.shape[1] >= _LARGE_BYTES else map
        are_whole = list(run(self._read_one, keys, into))
        count = are_whole.index(False) if False in are_whole else len(keys)
        self._writer.count(read=count)
        return count

    def _read_one(self, key: bytes, into: NDArray[np.uint8]) -> bool:
        """Fill `into`, uint8 [block bytes]. Return whether it is whole."""
        name = self._name(key)
        try:
            read_object(self._folder.object(name), self._identity, name, into)
        except (OSError, Corrupt) as error:
            is_passing = isinstance(error, OSError) and error.errno in _PASSING
            self._writer.note_miss(name, is_corrupt=isinstance(error, Corrupt), is_gone=not is_passing)
            return False
        return True

    def write(self, keys: Sequence[bytes], copy: Copy) -> int:
        """As BlockStore.write."""
        return self._writer.take([self._name(key) for key in keys], copy)

    def stats(self) -> StoreStats:
        """As BlockStore.stats."""
        return self._writer.stats()

    def flush(self) -> None:
        """Wait until what was taken is written or has failed, the index has all uses, and the sweep has ended. For tests,
        and before a hand-over."""
        self._writer.flush()

    def path_of(self, key: bytes) -> Path:
        """Return the path of a block's object, which may not exist."""
        return self._folder.object(self._name(key))

    def close(self) -> None:
        """As BlockStore.close; waits at most ten seconds."""
        self._end()
        self._readers.shutdown(wait=False)

    def _name(self, key: bytes) -> bytes:
        """Return the name of a block's object, which no block of another model has."""
        return sha256(self._identity + key).digest()


def _opened(folder: Folder, identity: bytes, words: str) -> _Opened:
    """Open the index of a folder; replace it if it is broken. Raises UnusableStore."""
    try:
        return _read(folder, identity, words)
    except FutureIndex as error:
        raise UnusableStore(
            folder.path, f"its index is of form {error}, newer than this version of paged; name another folder"
        ) from None
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and folder.index.exists() and not folder.is_alone:
            raise UnusableStore(folder.path, f"its index cannot be used: {error}") from error
    try:
        # The sweep will find the objects.
        for name in ("", "-wal", "-shm"):
            Path(f"{folder.index}{name}").unlink(missing_ok=True)
        return _read(folder, identity, words)
    except (sqlite3.Error, OSError) as error:
        raise UnusableStore(folder.path, f"its index cannot be used: {error}") from error


def _read(folder: Folder, identity: bytes, words: str) -> _Opened:
    """Open an index. Raises sqlite3.Error and FutureIndex."""
    index = Index(folder.index)
    try:
        model = index.model(identity, words)
        return index, model, index.new_keys(model)
    except BaseException:
        index.close()
        raise


class _Writer:
    """The writer's thread, and what it shares with other threads. `held`: names of this model's objects, which others read."""

    def __init__(
        self,
        folder: Folder,
        opened: _Opened,
        identity: bytes,
        limit_bytes: int,
        object_bytes: int,
        queue_bytes: int,
    ) -> None:
        self._folder, self._identity = folder, identity
        self._index, self._model, self.held = opened
        self._limit_bytes, self._object_bytes = limit_bytes, object_bytes
        # A block that is larger than the queue is written all the same.
        self._most_queued = max(1, queue_bytes // object_bytes)
        self._most_in_batch = min(_BATCH_BLOCKS, max(1, min(_BATCH_BYTES, limit_bytes) // object_bytes))
        self._queue: deque[_Taken] = deque()
        self._queued: set[bytes] = set()
        self._uses: deque[tuple[int, bytes]] = deque(maxlen=_MOST_USES)
        self._misses: deque[bytes] = deque()
        self._counts = dict.fromkeys(("written", "read", "dropped", "failed", "missed", "corrupt", "evicted"), 0)
        self._counting = Lock()
        # The writer waits for it, and `flush`.
        self._changed = Condition()
        self._is_stopping = self._is_busy = self._is_flushing = False
        self._unswept = folder.shards()
        self._has_swept = False
        self._grace_ns = 0 if folder.is_alone else _GRACE_NS
        self._thread = Thread(target=self._run, name="paged-disk-cache", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, names: list[bytes], copy: Copy) -> int:
        """As BlockStore.write."""
        room = self._most_queued - len(self._queue)
        places, stop = list[int](), len(names)
        for place, name in enumerate(names):
            if name not in self.held and name not in self._queued:
                if len(places) >= room:
                    stop = place
                    break
                places.append(place)
        if places:
            blocks = copy(places)
            # First: the writer may have written them before this thread goes on.
            self._queued.update(names[place] for place in places)
            with self._changed:
                self._queue.extend(zip([names[place] for place in places], blocks, strict=True))
                self._changed.notify()
        if stop < len(names):
            self.count(dropped=len(names) - stop)
        return stop

    def note_use(self, names: list[bytes]) -> None:
        """Note that a prompt's blocks, in order, are used now. The last one is evicted first, as in memory."""
        now = time.time_ns()
        self._uses.extend((now - place, name) for place, name in enumerate(names))

    def note_miss(self, name: bytes, *, is_corrupt: bool, is_gone: bool) -> None:
        """Note that an object was not read. `is_gone`: forget and remove it; else another try may succeed."""
        if is_gone:
            self.held.discard(name)
            self._misses.append(name)
        self.count(missed=1, corrupt=int(is_corrupt))

    def count(self, **counts: int) -> None:
        with self._counting:
            for name, more in counts.items():
                self._counts[name] += more

    def stats(self) -> StoreStats:
        return StoreStats(**self._counts, queued=len(self._queued), held=len(self.held))

    def flush(self) -> None:
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not (self._has_work() or self._is_busy or not self._has_swept) or not self._thread.is_alive()
            )
            self._is_flushing = False

    def stop(self) -> None:
        """Write the queue, and end the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    def _has_work(self) -> bool:
        return bool(self._queue or self._uses or self._misses)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                # Uses alone wait for the next second.
                self._changed.wait_for(
                    lambda: (
                        self._queue
                        or self._is_stopping
                        or (self._is_flushing and (self._has_work() or not self._has_swept))
                    ),
                    _IDLE_S if self._has_swept else _SWEEP_S,
                )
                self._is_busy = True
                is_last = self._is_stopping and not self._has_work()
            if is_last:
                break
            try:
                self._work()
            except Exception:
                # Most often a folder that is gone, full or locked, or too little memory. The engine goes on without the
                # disk, and this tries again: without the thread, queued blocks would wait for ever.
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopping, 0.05)
        with suppress(sqlite3.Error):
            self._index.close()
        self._folder.close()

    def _work(self) -> None:
        """Write a batch, and note misses and uses; without a batch sweep a folder. Raises OSError, sqlite3.Error and the
        like; then all of it is dropped, so that nothing fails again at once."""
        misses = [self._misses.popleft() for _ in range(len(self._misses))]
        uses = [self._uses.popleft() for _ in range(len(self._uses))]
        with self._changed:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._most_in_batch))]
        written = list[bytes]()
        try:
            if misses:
                for name in misses:
                    self._folder.drop(name)
                self._index.remove(misses)
            if uses:
                # Before `_write` evicts.
                self._index.use(uses)
            if batch:
                self._write(batch, written)
        finally:
            self._queued.difference_update(name for name, _ in batch)
            self.count(written=len(written), failed=len(batch) - len(written))
        if not batch:
            try:
                self.held.update(self._index.new_keys(self._model))
            finally:
                self._sweep()

    def _write(self, batch: list[_Taken], written: list[bytes]) -> None:
        """Write blocks, each whole or not at all, then their rows. `written` gets the names of those written, also if it
        raises."""
        try:
            self._make_room(len(batch) * self._object_bytes)
            for name, block in batch:
                write_object(self._folder.new(name), self._identity, name, block)
            for name, _ in batch:
                sync_object(self._folder.new(name))
                self._folder.put(name)
                written.append(name)
        finally:
            for name, _ in batch[len(written) :]:
                self._folder.forget_new(name)
            if written:
                now = time.time_ns()
                self._index.add([Row(name, self._model, self._object_bytes, now - i) for i, name in enumerate(written)])
                self.held.update(written)

    def _sweep(self) -> None:
        """Add rows for one more folder's objects without one: of a process that was killed before it wrote the row, or all,
        if the index was lost. Then evict down to the limit, which may be smaller than the last process's."""
        shard, names = next(self._unswept, (None, []))
        if shard is None:
            self._has_swept = True
            return
        found = list[Row]()
        for text in names:
            path = shard / text
            try:
                name = bytes.fromhex(text)
                if len(name) == KEY_BYTES and (name in self.held or self._index.has(name)):
                    continue
                identity, key, its = read_header(path)
                if key != name:
                    raise Corrupt("another key")
            except (ValueError, Corrupt):
                with suppress(OSError):
                    path.unlink()
                continue
            except OSError:
                continue
            now = time.time_ns()
            is_young = now - self._grace_ns < its.st_mtime_ns <= now
            if not is_young:
                # A time in the future comes from a wrong clock.
                used = min(its.st_mtime_ns, now)
                found.append(Row(name, self._index.model(identity, ""), its.st_size, used))
        if found:
            self._index.add(found)
            self.held.update(row.key for row in found if row.model == self._model)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        """Evict objects until so many more bytes stay within the limit."""
        gone = self._index.make_room(self._limit_bytes, num_bytes)
        self.held.difference_update(gone)
        for name in gone:
            self._folder.drop(name)
        self.count(evicted=len(gone))
