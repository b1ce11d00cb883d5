"""What the cache stored and removed since the last reading, for readers that keep an index of it elsewhere.

    take() ──> Cleared()   Removed(device, [x])   Stored(device, [a b c])   Stored(host, [x])

Nothing is written down before the first reading, and after that one record for nodes of a run that came to a tier or left it together. What
came and went between two calls is not in the events; that, their order and the hashes are found when they are read, so that taking them
costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .prefix_index import PrefixIndex
from .runs import DEVICE, Run, Span
from .tables import Tables

_NEVER = 2**62
# Nodes that came to a place together (or left it, where the third entry is False).
Record = tuple[list[Span], int, bool]
# Open runs that grew, object [n] of each and the block of its row that is its first node, and int64 [n]: at how many tokens of the row
# its next node was due, and how many it has.
_Grown = tuple[NDArray[np.object_], NDArray[np.int64], NDArray[np.int64]]


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


class Events(Sequence[Event]):
    """Events in the order in which they are to be applied. They are made when the first of them is read."""

    __slots__ = ("_grown", "_index", "_made", "_records", "_was_cleared")

    def __init__(self, index: PrefixIndex, was_cleared: bool, records: list[Record], grown: _Grown | None) -> None:
        self._index = index
        self._was_cleared = was_cleared
        self._records = records
        self._grown = grown
        self._made: list[Event] | None = None

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Event]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[type[list[Event]], tuple[list[Event]]]:
        # For a reader in another process: the events, without the index that they are made from.
        return list, (self._all(),)

    def _all(self) -> list[Event]:
        if self._made is None:
            if self._grown is not None:
                size = self._index.block_bytes // 4
                rows = zip(*(column.tolist() for column in self._grown), strict=True)
                grown = [(run, due // size - 1 - first, now // size - first) for (run, first), due, now in rows]
                self._records.append((grown, DEVICE, True))
            removed, stored = _net(self._records)
            events: list[Event] = [Cleared()] if self._was_cleared else []
            events += [self._removed(place, *span) for place, span in removed]
            events += [self._stored(place, *span) for place, span in stored]
            self._made, self._records, self._grown = events, [], None
        return self._made

    def _removed(self, place: int, run: Run, start: int, stop: int) -> Removed:
        return Removed(self._index.pools[place].tier, tuple(self._index.digests(run, stop, start)[::-1]))

    def _stored(self, place: int, run: Run, start: int, stop: int) -> Stored:
        index = self._index
        hashes = tuple(index.digests(run, stop, start))
        if start:
            parent: bytes | None = index.digests(run, start, start - 1)[0]
        else:
            parent = None if run.parent is None else index.digests(run.parent, run.at + 1, run.at)[0]
        top = run
        while top.parent is not None:
            top = top.parent
        tokens = np.frombuffer(index.run_tokens(run, start, stop), np.int32)
        return Stored(index.pools[place].tier, hashes, parent, tokens, top.key[: -index.block_bytes])


class EventLog:
    """What happened since the last `take`. The index tells it everything but what rows compute at the end of their open runs."""

    def __init__(self, index: PrefixIndex, tables: Tables) -> None:
        self._index = index
        self._tables = tables
        self._records: list[Record] = []
        self._was_cleared = False
        # By run and place: the first and last of the nodes that came there and are not confirmed yet.
        self._pending: dict[tuple[Run, int], tuple[int, int]] = {}
        # By row that has an open run: the tokens that it has when the run's next node is due to be told; and the run, and the block that
        # is its first node.
        self._due = np.full(tables.num_rows, _NEVER, np.int64)
        self._open: NDArray[np.object_] = np.empty(tables.num_rows, object)
        tables.before_growth.append(self._ensure_rows)
        index.log = self
        for run in index.runs.values():
            if run.row >= 0:
                self.opened(run, index.paths[run.row].published)
            for place in range(len(run.blocks)):
                self.came(_residing(run, place, 0, None), place)

    def opened(self, run: Run, first: int) -> None:
        """The run is open at its row, whose block `first` is to be its first node."""
        row = run.row
        self._due[row] = (first + 1) * self._tables.block_size
        self._open[row] = run, first

    def closed(self, run: Run, row: int, length: int) -> None:
        """The run, which was open at `row`, has these nodes on the device, and the row computes no more of them."""
        told = self._num_told(row)
        self._due[row] = _NEVER
        if length > told:
            self.came([(run, told, length)], DEVICE)

    def came(self, nodes: list[Span], place: int) -> None:
        """These nodes reside in a place from now on; pending ones are told when they are confirmed. The list belongs to the log."""
        if any(run.pending or run.row >= 0 for run, _, _ in nodes):
            for run, first, stop in nodes:
                first = max(first, self._index.confirmed_length(run))
                if first < stop:
                    # A node that left a place and came back before it was confirmed is told once.
                    least, most = self._pending.get((run, place), (first, stop))
                    self._pending[run, place] = min(first, least), max(stop, most)
            nodes = self._confirmed(nodes)
        self._records.append((nodes, place, True))

    def left(self, nodes: list[Span], place: int) -> None:
        """These nodes reside in a place no more. The list belongs to the log."""
        if self._pending:
            nodes = self._confirmed(nodes)
        self._records.append((nodes, place, False))

    def confirm(self) -> None:
        """A batch has ended: some nodes may be confirmed now, others are gone."""
        pending, self._pending = self._pending, {}
        for (run, place), (first, stop) in pending.items():
            if spans := _residing(run, place, first, stop):
                self.came(spans, place)

    def _confirmed(self, nodes: list[Span]) -> list[Span]:
        clipped = [(run, first, min(stop, self._index.confirmed_length(run))) for run, first, stop in nodes]
        return [span for span in clipped if span[1] < span[2]]

    def clear(self) -> None:
        """All content is forgotten; whatever was not told yet never will be."""
        self._due[:] = _NEVER
        self._records, self._pending = [], {}
        self._was_cleared = True

    def take(self) -> Events:
        """What happened since the last call. A reader that applies all of it from the beginning knows what each tier holds."""
        was_cleared, self._was_cleared = self._was_cleared, False
        records, self._records = self._records, []
        return Events(self._index, was_cleared, records, self._take_grown())

    def snapshot(self) -> Events:
        """What a reader that starts now has to apply before it goes on with `take`: all that has been told and still holds."""
        records = [record for run in self._index.runs.values() for record in self._held(run)]
        # What was not told yet is taken back.
        records += [(nodes, place, not has_come) for nodes, place, has_come in self._records]
        return Events(self._index, False, records, None)

    def _held(self, run: Run) -> list[Record]:
        """Where the confirmed nodes of a run reside, without those of an open one that are still to be told."""
        length = self._index.confirmed_length(run)
        found: list[Record] = [(_residing(run, place, 0, length), place, True) for place in range(len(run.blocks))]
        return found if run.row < 0 else [*found, ([(run, 0, self._num_told(run.row))], DEVICE, True)]

    def _num_told(self, row: int) -> int:
        """Nodes of the row's open run that were told."""
        first: int = self._open[row][1]
        return self._due.item(row) // self._tables.block_size - 1 - first

    def _ensure_rows(self, num_rows: int) -> None:
        """Make room for `num_rows` rows; there may be more already, where the tables then found no memory for themselves."""
        more = num_rows - len(self._due)
        if more > 0:
            due = np.concatenate([self._due, np.full(more, _NEVER, np.int64)])
            self._open = np.concatenate([self._open, np.empty(more, object)])
            self._due = due

    def _take_grown(self) -> _Grown | None:
        """Nodes of open runs that were not told yet: rows compute them without a word."""
        tables, size = self._tables, self._tables.block_size
        rows = (tables.num_computed >= self._due[: tables.num_rows]).nonzero()[0]
        if not len(rows):
            return None
        due, now, grown = self._due[rows], tables.num_computed[rows], self._open[rows]
        if self._index.num_attentive:
            for i in self._index.attentive(rows).tolist():
                # A guarded run ends where another one hangs off it.
                run, first = grown[i]
                now[i] = (first + self._index.confirmed_length(run)) * size
        self._due[rows] = now - now % size + size
        return grown, due, now


def _net(records: list[Record]) -> tuple[list[tuple[int, Span]], list[tuple[int, Span]]]:
    """What records add up to: what left a place, children first, and what came to one, parents first."""
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
    """Which of these nodes reside in a place, but for those of an open run on the device."""
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
