"""Events: what the cache stored and removed, for an index of it elsewhere.

    take() ──> Cleared()   Removed(device, [x])   Stored(device, [a b c])   Stored(host, [x])

Nothing is recorded before the first reading. Then the runs are noted whose nodes come or leave, and a reading compares
what they have with what was told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .prefix_index import PrefixIndex
from .runs import DEVICE, NUM_PLACES, Run, upwards
from .tables import Tables

# Consecutive nodes of a run: the first, and the one after the last.
Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Blocks of content that a tier, "device" or "host", now has, each the child of the one before it.

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
    """Blocks of content that left a tier, children before parents."""

    tier: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Both tiers hold no content."""


Event = Stored | Removed | Cleared


class EventLog:
    """Changes since the last `take`. The index says in which runs, but for what rows compute at the end of open ones."""

    def __init__(self, index: PrefixIndex, tables: Tables) -> None:
        self._index, self._tables = index, tables
        self._was_cleared = False
        # By run and place, the nodes that readers know of.
        self._told: dict[tuple[Run, int], list[Stretch]] = {}
        self._changed = set(index.runs.values())
        index.listen(self)
        for run in index.runs.values():
            if run.row >= 0:
                self.opened(run.row, index.paths[run.row].published)

    def opened(self, row: int, first: int) -> None:
        """Note that the row has an open run, and block `first` of the row is the first node that is not told."""
        self._tables.next_event[row] = (first + 1) * self._tables.block_size

    def closed(self, run: Run, row: int) -> None:
        """Note that the row's run is closed."""
        self._tables.next_event[row] = 0
        self._changed.add(run)

    def changed(self, runs: Iterable[Run]) -> None:
        """Note that nodes of these runs came to a place or left it, or were confirmed."""
        self._changed.update(runs)

    def clear(self) -> None:
        """Note that all content is forgotten."""
        self._told, self._changed, self._was_cleared = {}, set(), True

    def take(self) -> list[Event]:
        """Return the changes since the last call. All of them together give what each tier holds."""
        self._note_grown()
        removed, stored, told = list[Event](), list[Event](), dict[tuple[Run, int], list[Stretch]]()
        # A child's id is higher than its parent's.
        for run in sorted(self._changed, key=lambda run: run.id):
            for place in range(NUM_PLACES):
                before, now = self._told.get((run, place), []), self._residing(run, place)
                if now != before:
                    told[run, place] = now
                    removed += [self._removed(run, place, *part) for part in _without(before, now)]
                    stored += [self._stored(run, place, *part) for part in _without(now, before)]
        events: list[Event] = [Cleared()] if self._was_cleared else []
        # Only when the whole reading is made: one that fails half-way is made again.
        self._told |= told
        for key in [key for key, now in told.items() if not now]:
            del self._told[key]
        self._changed, self._was_cleared = set(), False
        return [*events, *removed[::-1], *stored]

    def snapshot(self) -> list[Event]:
        """What a new reader applies before it goes on with `take`: all that was taken and still holds."""
        told = sorted(self._told.items(), key=lambda item: (item[0][0].id, item[0][1]))
        return [self._stored(run, place, *part) for (run, place), parts in told for part in parts]

    def _note_grown(self) -> None:
        """Note the open runs whose rows computed more nodes."""
        tables, index = self._tables, self._index
        is_due = (tables.next_event > 0) & (tables.num_computed >= tables.next_event)
        for row in is_due.nonzero()[0].tolist():
            path = index.paths[row]
            if path.open is not None:
                # A guarded run ends where another one hangs off it.
                length = index.confirmed_length(path.open)
                self.opened(row, path.published + length)
                self._changed.add(path.open)

    def _residing(self, run: Run, place: int) -> list[Stretch]:
        """The confirmed nodes of a run that reside in a place."""
        length = self._index.confirmed_length(run)
        if run.row >= 0 and place == DEVICE:
            return [(0, length)] if length > 0 else []
        blocks = run.blocks[place]
        if blocks is None or length <= 0:
            return []
        if (there := run.num_there(place, 0, length)) == min(length, len(blocks)):
            # Most often there is no gap.
            return [(0, there)]
        edges = np.diff(blocks[:length] >= 0, prepend=False, append=False).nonzero()[0].tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _removed(self, run: Run, place: int, start: int, stop: int) -> Removed:
        return Removed(self._index.pools[place].tier, tuple(self._index.digests(run, stop, start)[::-1]))

    def _stored(self, run: Run, place: int, start: int, stop: int) -> Stored:
        index = self._index
        hashes, parent = tuple(index.digests(run, stop, start)), index.digest_before(run, start)
        tokens = np.frombuffer(index.run_tokens(run, start, stop), np.int32)
        *_, (top, _) = upwards(run, start)
        return Stored(index.pools[place].tier, hashes, parent, tokens, top.key[: -index.block_bytes])


def _without(stretches: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """What of these stretches is in none of the others; both rise."""
    for first, last in others:
        parts = [part for start, stop in stretches for part in ((start, min(stop, first)), (max(start, last), stop))]
        stretches = [part for part in parts if part[0] < part[1]]
    return stretches
