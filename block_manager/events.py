"""Events: what the cache stored and removed, for an index of it elsewhere.

    take() ──> Cleared()   Removed(device, [x])   Stored(device, [a b c])   Stored(host, [x])

Nothing is recorded before the first reading; then one record covers the nodes of a run that come to a tier or leave it
together. Net changes, their order and the hashes are computed when events are read, so that taking them is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .prefix_index import PrefixIndex
from .runs import DEVICE, NUM_PLACES, Run, Span, upwards
from .tables import Tables

# Nodes that came to a place together (True), or left it (False).
Record = tuple[list[Span], int, bool]


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


class Events(Sequence[Event]):
    """Events in the order in which a reader applies them, made when the first one is read."""

    def __init__(self, make: Callable[[], list[Event]]) -> None:
        self._make: Callable[[], list[Event]] | None = make
        self._made: list[Event] = []

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[type[list[Event]], tuple[list[Event]]]:
        # Another process gets the events, without the index that they are made from.
        return list, (self._all(),)

    def _all(self) -> list[Event]:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made


class EventLog:
    """Changes since the last `take`. The index reports them, but for what rows compute at the end of open runs."""

    def __init__(self, index: PrefixIndex, tables: Tables) -> None:
        self._index = index
        self._tables = tables
        self._records: list[Record] = []
        self._was_cleared = False
        # By run and place: the span of nodes that came there and are not confirmed yet.
        self._pending: dict[tuple[Run, int], tuple[int, int]] = {}
        index.listen(self)
        for run in index.runs.values():
            if run.row >= 0:
                self.opened(run.row, index.paths[run.row].published)
            for place in range(NUM_PLACES):
                self.came(_residing(run, place, 0, None), place)

    def opened(self, row: int, first: int) -> None:
        """Note that the row has an open run, and block `first` of the row is the first node that is not recorded."""
        self._tables.next_event[row] = (first + 1) * self._tables.block_size

    def closed(self, run: Run, row: int, length: int) -> None:
        """Record the run's other nodes: it is closed with `length` nodes on the device. The row's path still is open."""
        recorded = self._num_recorded(row)
        self._tables.next_event[row] = 0
        if length > recorded:
            self.came([(run, recorded, length)], DEVICE)

    def came(self, nodes: list[Span], place: int) -> None:
        """Record nodes that now reside in a place, pending ones when they are confirmed. Takes over the list."""
        if any(run.pending or run.row >= 0 for run, _, _ in nodes):
            for run, first, stop in nodes:
                first = max(first, self._index.confirmed_length(run))
                if first < stop:
                    # A node that leaves and comes back before it is confirmed is recorded once.
                    least, most = self._pending.get((run, place), (first, stop))
                    self._pending[run, place] = min(first, least), max(stop, most)
            nodes = self._confirmed(nodes)
        self._records.append((nodes, place, True))

    def left(self, nodes: list[Span], place: int) -> None:
        """Record nodes that no longer reside in a place. Takes over the list."""
        if self._pending:
            nodes = self._confirmed(nodes)
        self._records.append((nodes, place, False))

    def confirm(self) -> None:
        """Record the pending nodes that the end of a batch has confirmed."""
        pending, self._pending = self._pending, {}
        for (run, place), (first, stop) in pending.items():
            if spans := _residing(run, place, first, stop):
                self.came(spans, place)

    def _confirmed(self, nodes: list[Span]) -> list[Span]:
        clipped = [(run, first, min(stop, self._index.confirmed_length(run))) for run, first, stop in nodes]
        return [span for span in clipped if span[1] < span[2]]

    def clear(self) -> None:
        """Record that all content is forgotten, and drop what was not taken."""
        self._records, self._pending = [], {}
        self._was_cleared = True

    def take(self) -> Events:
        """Return the changes since the last call. All of them together give what each tier holds."""
        was_cleared, self._was_cleared = self._was_cleared, False
        records, self._records = self._records, []
        if grown := self._take_grown():
            records.append((grown, DEVICE, True))
        return Events(partial(self._made_of, records, was_cleared=was_cleared))

    def snapshot(self) -> Events:
        """What a new reader applies before it goes on with `take`: all that was taken and still holds."""
        records = [record for run in self._index.runs.values() for record in self._held(run)]
        # Undo what was not taken yet.
        records += [(nodes, place, not has_come) for nodes, place, has_come in self._records]
        return Events(partial(self._made_of, records))

    def _held(self, run: Run) -> list[Record]:
        length = self._index.confirmed_length(run)
        found: list[Record] = [(_residing(run, place, 0, length), place, True) for place in range(NUM_PLACES)]
        return found if run.row < 0 else [*found, ([(run, 0, self._num_recorded(run.row))], DEVICE, True)]

    def _made_of(self, records: list[Record], *, was_cleared: bool = False) -> list[Event]:
        removed, stored = _net(records)
        events: list[Event] = [Cleared()] if was_cleared else []
        events += [self._removed(place, *span) for place, span in removed]
        events += [self._stored(place, *span) for place, span in stored]
        return events

    def _removed(self, place: int, run: Run, start: int, stop: int) -> Removed:
        return Removed(self._index.pools[place].tier, tuple(self._index.digests(run, stop, start)[::-1]))

    def _stored(self, place: int, run: Run, start: int, stop: int) -> Stored:
        index = self._index
        hashes, parent = tuple(index.digests(run, stop, start)), index.digest_before(run, start)
        tokens = np.frombuffer(index.run_tokens(run, start, stop), np.int32)
        *_, (top, _) = upwards(run, start)
        return Stored(index.pools[place].tier, hashes, parent, tokens, top.key[: -index.block_bytes])

    def _num_recorded(self, row: int) -> int:
        return self._tables.next_event.item(row) // self._tables.block_size - 1 - self._index.paths[row].published

    def _take_grown(self) -> list[Span]:
        """Return the nodes of open runs that are not recorded yet, and count them as recorded."""
        tables, found = self._tables, list[Span]()
        is_due = (tables.next_event > 0) & (tables.num_computed >= tables.next_event)
        for row in is_due.nonzero()[0].tolist():
            path, recorded = self._index.paths[row], self._num_recorded(row)
            # A guarded run ends where another one hangs off it.
            if path.open is not None and (length := self._index.confirmed_length(path.open)) > recorded:
                found.append((path.open, recorded, length))
                self.opened(row, path.published + length)
        return found


def _net(records: list[Record]) -> tuple[list[tuple[int, Span]], list[tuple[int, Span]]]:
    """The sum of records: what left a place, children first, and what came to one, parents first."""
    of_run: dict[tuple[int, int], list[tuple[bool, Span]]] = {}
    for nodes, place, has_come in records:
        for span in nodes:
            of_run.setdefault((span[0].id, place), []).append((has_come, span))
    removed: list[tuple[int, Span]] = []
    stored: list[tuple[int, Span]] = []
    # A child's id is higher than its parent's.
    for key in sorted(of_run):
        place, changes = key[1], of_run[key]
        has_come, (run, start, stop) = changes[0]
        if len(changes) == 1:
            if stop > start:
                (stored if has_come else removed).append((place, (run, start, stop)))
            continue
        net = np.zeros(max(span[2] for _, span in changes), np.int8)
        for has_come, (_, start, stop) in changes:
            net[start:stop] += 1 if has_come else -1
        stored += [(place, (run, *stretch)) for stretch in _stretches(net > 0)]
        removed += [(place, (run, *stretch)) for stretch in _stretches(net < 0)]
    return removed[::-1], stored


def _residing(run: Run, place: int, first: int, stop: int | None) -> list[Span]:
    """The nodes of these that reside in a place, but for an open run's on the device."""
    blocks = run.blocks[place]
    if blocks is None:
        return []
    return [(run, first + start, first + end) for start, end in _stretches(blocks[first:stop] >= 0)]


def _stretches(is_one: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, stop) of each stretch of True."""
    if is_one.all():
        return [(0, len(is_one))] if len(is_one) else []
    edges = np.diff(is_one, prepend=False, append=False).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
