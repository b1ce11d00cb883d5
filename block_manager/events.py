"""What the cache stored and removed since somebody last asked, for those who keep an index of it elsewhere.

    take() ──> Cleared()   Removed(device, [x])   Stored(device, [a b c])   Stored(host, [x])

Nothing is written down while nobody asks, and after that only which runs changed: the events are the difference between what was told
and what is, so that what came and went in between is not in them. Taking them costs little; hashes are computed when they are read.
Knows runs and what a reader has been told. Does not know when or why content moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from block_manager.content_key import extend_chain, namespace_digest
from block_manager.prefix_index import PrefixIndex
from block_manager.runs import Run
from block_manager.tables import Tables

_NEVER = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Blocks of content that a tier, "device" or "host", has from now on, each the child of the one before it.

    hashes     chained SHA-256 of each block, as `BlockManager.block_hashes` gives them
    parent     the hash of the block before the first one, None where a prompt begins
    tokens     int32 [len(hashes) * block_size]
    namespace  the encoded namespace; equal for equal salt, adapter and key
    """

    tier: str
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: NDArray[np.int32]
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks of content that a tier has no more, children before parents."""

    tier: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Both tiers hold no content."""


Event = Stored | Removed | Cleared


class _Told:
    """What readers know of one run: how many nodes the device was told to have, and which ones the host.

    While the run is open at `row`, where its first node is block `first`, the former is kept by row: see EventLog.
    """

    __slots__ = ("at", "device", "digests", "first", "host", "parent", "row", "run", "top_key")

    def __init__(self, run: Run, parent: _Told | None) -> None:
        self.run = run
        self.parent = parent
        # The run forgets these when it dies.
        self.at = run.at
        self.top_key: bytes = run.key if parent is None else parent.top_key
        self.row = self.first = -1
        self.device = 0
        self.host: NDArray[np.bool_] | None = None
        self.digests: list[bytes] = []


# A stretch of nodes of a run in a tier: from `start` to `stop` - 1.
_Record = tuple[_Told, str, int, int]


class Events(Sequence[Event]):
    """Events in the order in which they are to be applied. They are made when the first of them is read."""

    def __init__(self, log: EventLog, was_cleared: bool, removed: list[_Record], stored: list[_Record]) -> None:
        self._log = log
        self._was_cleared = was_cleared
        self._removed = removed
        self._stored = stored
        self._made: list[Event] | None = None

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return self._was_cleared + len(self._removed) + len(self._stored)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> list[Event]:
        if self._made is None:
            events: list[Event] = [Cleared()] if self._was_cleared else []
            events += [
                Removed(tier, tuple(self._log.hashes(told, stop)[start:stop][::-1]))
                for told, tier, start, stop in self._removed
            ]
            events += [self._log.stored(*record) for record in self._stored]
            self._made = events
        return self._made


class EventLog:
    """What happened since the last `take`, and what all that was taken adds up to."""

    def __init__(self, index: PrefixIndex, tables: Tables) -> None:
        self._index = index
        self._tables = tables
        self._block_bytes = 4 * tables.block_size
        self._told: dict[int, _Told] = {}
        self._was_cleared = False
        # By row, while its open run has been told: the tokens that it has when the run's next node is due, and what was told.
        self._due = np.full(tables.num_rows, _NEVER, np.int64)
        self._told_of_row: NDArray[np.object_] = np.empty(tables.num_rows, object)
        index.changed = set(index.runs.values())

    def clear(self) -> None:
        """All content is forgotten; whatever was not told yet never will be."""
        self._told.clear()
        self._due[:] = _NEVER
        self._index.changed = set()
        self._was_cleared = True

    def take(self) -> Events:
        """What happened since the last call. A reader that applies all of it from the beginning knows what each tier holds."""
        index, tables = self._index, self._tables
        if len(self._due) < tables.num_rows:
            more = tables.num_rows - len(self._due)
            self._due = np.concatenate([self._due, np.full(more, _NEVER, np.int64)])
            self._told_of_row = np.concatenate([self._told_of_row, np.empty(more, object)])
        changed, index.changed = index.changed or set(), set()
        removed: list[_Record] = []
        stored: list[_Record] = []
        # Runs that were closed first: what was told of them is kept by rows, which others may have by now.
        for run in sorted([run for run in changed if run.row < 0], key=_by_id):
            self._closed(run, removed, stored)
        for run in sorted([run for run in changed if run.row >= 0], key=_by_id):
            self._opened(run, removed, stored)
        self._grown(stored)
        # Parents first: a child's id is higher.
        stored.sort(key=_by_run)
        removed.sort(key=_by_run, reverse=True)
        was_cleared, self._was_cleared = self._was_cleared, False
        return Events(self, was_cleared, removed, stored)

    def snapshot(self) -> Events:
        """What a reader that starts now has to apply before it goes on with `take`: all that has been told and still holds."""
        stored: list[_Record] = []
        for told in self._told.values():
            if told.row >= 0:
                told.device = self._num_told(told)
            if told.device:
                stored.append((told, "device", 0, told.device))
            if told.host is not None:
                stored += [(told, "host", start, stop) for start, stop in _stretches(told.host)]
        stored.sort(key=_by_run)
        return Events(self, False, [], stored)

    def hashes(self, told: _Told, count: int) -> list[bytes]:
        """Chained SHA-256 of the first `count` nodes of a run or more, each computed once."""
        digests = told.digests
        if len(digests) < count:
            if digests:
                digest = digests[-1]
            elif told.parent is not None:
                digest = self.hashes(told.parent, told.at + 1)[told.at]
            else:
                digest = namespace_digest(self._namespace(told))
            known = len(digests) * self._block_bytes
            extend_chain(digests, digest, self._index.run_tokens(told.run, count)[known:], self._block_bytes)
        return digests

    def stored(self, told: _Told, tier: str, start: int, stop: int) -> Stored:
        """The event of a record."""
        hashes, size = self.hashes(told, stop), self._block_bytes
        if start:
            parent: bytes | None = hashes[start - 1]
        else:
            parent = None if told.parent is None else self.hashes(told.parent, told.at + 1)[told.at]
        data = self._index.run_tokens(told.run, stop)
        tokens = np.frombuffer(data[start * size : stop * size], np.int32)
        return Stored(tier, tuple(hashes[start:stop]), parent, tokens, self._namespace(told))

    def _namespace(self, told: _Told) -> bytes:
        return told.top_key[: -self._block_bytes]

    def _of(self, run: Run) -> _Told:
        told = self._told.get(run.id)
        if told is None:
            parent = None if run.parent is None else self._of(run.parent)
            told = self._told[run.id] = _Told(run, parent)
        return told

    def _num_told(self, told: _Told) -> int:
        """Nodes of an open run that were told."""
        return int(self._due[told.row]) // self._tables.block_size - 1 - told.first

    def _closed(self, run: Run, removed: list[_Record], stored: list[_Record]) -> None:
        told, now = self._told.get(run.id), run.num_device
        if told is None:
            if not now and not run.num_host:
                return
            told = self._of(run)
        elif told.row >= 0:
            told.device = self._num_told(told)
            self._due[told.row] = _NEVER
            told.row = -1
        before, told.device = told.device, now
        if now > before:
            stored.append((told, "device", before, now))
        elif now < before:
            removed.append((told, "device", now, before))
        if run.num_host or told.host is not None:
            self._on_host(told, removed, stored)
        if not now and told.host is None:
            del self._told[run.id]

    def _opened(self, run: Run, removed: list[_Record], stored: list[_Record]) -> None:
        """An open run that is new, or whose nodes others have swapped out."""
        told = self._of(run)
        if told.row < 0:
            told.row, told.first = run.row, self._index.paths[run.row].published
            self._told_of_row[run.row] = told
            self._due[run.row] = (told.first + 1) * self._tables.block_size
        if run.num_host or told.host is not None:
            self._on_host(told, removed, stored)

    def _grown(self, stored: list[_Record]) -> None:
        """Open runs that have nodes which were not told: rows compute them without a word."""
        tables, size = self._tables, self._tables.block_size
        rows = (tables.num_computed >= self._due).nonzero()[0]
        if not len(rows):
            return
        full = tables.num_computed[rows] // size
        is_lazy = self._index.is_lazy[rows]
        starts = self._due[rows] // size - 1
        for i in (~is_lazy).nonzero()[0].tolist():
            # A guarded run ends where another one hangs off it.
            run = self._told_of_row[rows[i]].run
            full[i] = self._index.paths[run.row].published + self._index.confirmed_length(run)
        self._due[rows] = (full + 1) * size
        for told, start, stop in zip(self._told_of_row[rows].tolist(), starts.tolist(), full.tolist(), strict=True):
            if stop > start:
                stored.append((told, "device", start - told.first, stop - told.first))

    def _on_host(self, told: _Told, removed: list[_Record], stored: list[_Record]) -> None:
        host, before = told.run.host, told.host
        after = None if host is None or not told.run.num_host else host >= 0
        told.host = after
        if before is None or after is None:
            whole = after if before is None else before
            records = stored if before is None else removed
            if whole is not None:
                records += [(told, "host", start, stop) for start, stop in _stretches(whole)]
            return
        if len(before) != len(after):
            length = max(len(after), len(before))
            after, before = _padded(after, length), _padded(before, length)
        places = (after != before).nonzero()[0]
        if not len(places):
            return
        start, stop = places.item(0), places.item(-1) + 1
        if stop - start == len(places) and (after[start:stop].all() or not after[start:stop].any()):
            (stored if after[start] else removed).append((told, "host", start, stop))
            return
        stored += [(told, "host", start, stop) for start, stop in _stretches(after & ~before)]
        removed += [(told, "host", start, stop) for start, stop in _stretches(before & ~after)]


def _by_id(run: Run) -> int:
    return run.id


def _by_run(record: _Record) -> int:
    return record[0].run.id


def _stretches(places: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, stop) of each stretch of True."""
    if places.all():
        return [(0, len(places))] if len(places) else []
    edges = np.diff(places, prepend=False, append=False).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _padded(places: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    if len(places) == length:
        return places
    padded = np.zeros(length, np.bool_)
    padded[: len(places)] = places
    return padded
