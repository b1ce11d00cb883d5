"""What the cache stored and removed since somebody last asked, for those who keep an index of it elsewhere.

    take() ──> Stored(device, [a b c])  Stored(host, [x])  Removed(device, [x])  Cleared()

Nothing is written down while nobody asks, and after that only which runs changed: the events are the difference between what was told
and what is, so that what came and went in between is not in them. Knows runs and what a reader has been told. Does not know when or
why content moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
Key = tuple[str, bytes]


@dataclass(slots=True)
class _Told:
    """What readers know of one run: its hashes and tokens as far as they were needed, and where its nodes were last told to be."""

    run: Run
    namespace: bytes
    parent: bytes | None
    hashes: list[bytes] = field(default_factory=list)
    tokens: bytes = b""
    places: dict[str, NDArray[np.bool_]] = field(default_factory=dict)


class EventLog:
    """Events since the last `take`, and what all that were taken add up to."""

    def __init__(self, index: PrefixIndex, tables: Tables) -> None:
        self._index = index
        self._tables = tables
        self._block_bytes = 4 * tables.block_size
        self._told: dict[int, _Told] = {}
        self._was_cleared = False
        # By row, how many tokens it has when its open run has a node that was not told.
        self._due = np.full(tables.num_rows, _NEVER, np.int64)
        index.changed = set(index.runs.values())

    def clear(self) -> None:
        """All content is forgotten; whatever was not told yet never will be."""
        self._told.clear()
        self._due[:] = _NEVER
        self._index.changed = set()
        self._was_cleared = True

    def take(self) -> list[Event]:
        """What happened since the last call. A reader that applies all of it from the beginning knows what each tier holds."""
        events: list[Event] = [Cleared()] if self._was_cleared else []
        self._was_cleared = False
        index = self._index
        runs = index.changed | set(self._grown_runs()) if index.changed is not None else set()
        index.changed = set()
        in_order = sorted(runs, key=lambda run: run.id)
        stored: list[tuple[str, _Told, NDArray[np.int64]]] = []
        removed: list[tuple[str, _Told, NDArray[np.int64]]] = []
        for run in in_order:
            told = self._told.get(run.id)
            now = self._places(run)
            if told is None:
                if not any(places.any() for places in now.values()):
                    continue
                told = self._told[run.id] = self._introduced(run)
            length = max(len(places) for places in now.values())
            if length > len(told.hashes):
                told.hashes += index.digests(run, length)[len(told.hashes) :]
                told.tokens = index.run_tokens(run, length)
            for tier, places in now.items():
                before = _padded(told.places.get(tier), len(told.hashes))
                after = _padded(places, len(told.hashes))
                if (came := (after & ~before).nonzero()[0]).size:
                    stored.append((tier, told, came))
                if (went := (before & ~after).nonzero()[0]).size:
                    removed.append((tier, told, went))
                told.places[tier] = after
        events += self._without_returns(stored, removed)
        for run in in_order:
            told = self._told.get(run.id)
            if told is not None and not any(places.any() for places in told.places.values()):
                del self._told[run.id]
        return events

    def snapshot(self) -> list[Event]:
        """What a reader that starts now has to apply before it goes on with `take`: all that has been told and still holds."""
        found: list[Event] = []
        for told in sorted(self._told.values(), key=lambda told: told.run.id):
            for tier, places in told.places.items():
                found += self._stored(tier, told, places.nonzero()[0])
        return found

    def _grown_runs(self) -> Iterator[Run]:
        """Open runs that have nodes which were not told: rows compute them without a word."""
        tables = self._tables
        if len(self._due) < tables.num_rows:
            self._due = np.concatenate([self._due, np.full(tables.num_rows - len(self._due), _NEVER, np.int64)])
        for row in (tables.num_computed >= self._due).nonzero()[0].tolist():
            path = self._index.paths.get(row)
            if path is not None and path.open is not None:
                yield path.open
            else:
                self._due[row] = _NEVER

    def _places(self, run: Run) -> dict[str, NDArray[np.bool_]]:
        """Which nodes of a run each tier has now, a bool each."""
        if run.row >= 0:
            num_device = self._index.confirmed_length(run)
            first = self._index.paths[run.row].published
            self._due[run.row] = (first + num_device + 1) * self._tables.block_size
        else:
            num_device = run.num_device
        on_host = np.empty(0, np.bool_) if run.host is None else run.host[: max(run.length, num_device)] >= 0
        return {"device": np.ones(num_device, np.bool_), "host": on_host}

    def _introduced(self, run: Run) -> _Told:
        top = run
        while top.parent is not None:
            top = top.parent
        parent = None if run.parent is None else self._index.digests(run.parent, run.at + 1)[run.at]
        return _Told(run, top.key[: -self._block_bytes], parent)

    def _without_returns(
        self,
        stored: list[tuple[str, _Told, NDArray[np.int64]]],
        removed: list[tuple[str, _Told, NDArray[np.int64]]],
    ) -> Iterable[Event]:
        """What is stored, parents first, then what is removed, children first, without what went and came back as another run."""
        gone = {(tier, told.hashes[at]) for tier, told, went in removed for at in went.tolist()}
        back: set[Key] = set()
        if gone:
            back = {
                key for tier, told, came in stored for at in came.tolist() if (key := (tier, told.hashes[at])) in gone
            }
        for tier, told, came in stored:
            fresh = [at for at in came.tolist() if (tier, told.hashes[at]) not in back] if back else came.tolist()
            yield from self._stored(tier, told, np.array(fresh, np.int64))
        for tier, told, went in reversed(removed):
            hashes = tuple(told.hashes[at] for at in went[::-1].tolist() if (tier, told.hashes[at]) not in back)
            if hashes:
                yield Removed(tier, hashes)

    def _stored(self, tier: str, told: _Told, places: NDArray[np.int64]) -> Iterator[Stored]:
        """An event for each stretch of nodes that follow one another."""
        if not len(places):
            return
        for stretch in np.split(places, (np.diff(places) != 1).nonzero()[0] + 1):
            start, stop = int(stretch[0]), int(stretch[-1]) + 1
            tokens = np.frombuffer(told.tokens[start * self._block_bytes : stop * self._block_bytes], np.int32)
            parent = told.hashes[start - 1] if start else told.parent
            yield Stored(tier, tuple(told.hashes[start:stop]), parent, tokens, told.namespace)


def _padded(places: NDArray[np.bool_] | None, length: int) -> NDArray[np.bool_]:
    padded = np.zeros(length, np.bool_)
    if places is not None:
        padded[: len(places)] = places
    return padded
