"""Events: what the cache stored and removed, for an index of it elsewhere.

    take() ──> Cleared()   Removed(device, [x])   Stored(device, [a b c])   RestartPoint(c, 48)   Stored(host, [x])

Nothing is recorded before the first `take`. From then on the index notes the runs whose nodes come or leave, and a
`take` compares what these runs have with what was reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .growth import Growth
from .layout import LayerGroup
from .prefix_index import PrefixIndex
from .runs import DEVICE, NUM_PLACES, Run, num_nodes, spans_to, stretches, upwards
from .side_content import SideContent

# Consecutive nodes of a run: the first offset, and the one after the last.
Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Blocks of content that a tier, "device" or "host", now has. Each is the child of the one before it.

    hashes     chained SHA-256 of each block, as in `BlockManager.block_hashes`
    parent     the hash of the block before the first one; None where a prompt begins
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
class RestartPoint:
    """The end of a device block behind which a prompt can begin, in a model whose layers are of several kinds.

    hash       hash of the block, as in `Stored`
    length     tokens up to the end of the block: a prompt that begins there need not compute them
    groups     the groups of the model
    is_stored  True: now every group can stand there; False: one of them no longer can
    """

    hash: bytes
    length: int
    groups: tuple[LayerGroup, ...]
    is_stored: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """Neither tier holds content."""


Event = Stored | Removed | RestartPoint | Cleared

# The kind, beside the places, of nodes after which all groups can stand.
_RESTARTS = NUM_PLACES


class EventLog:
    """Changes since the last `take`. The index notes changed runs; the growth of open ones is found by `next_event`."""

    def __init__(self, index: PrefixIndex, growth: Growth, sides: SideContent) -> None:
        self._index, self._tables, self._layout, self._sides = index, growth.tables, growth.layout, sides
        # Block ids without a full group are positions: no content.
        self._kinds = list(range(NUM_PLACES)) if growth.layout.full_pages else []
        self._was_cleared = False
        # By run and kind (a place, or restart points): the nodes that were reported.
        self._reported: dict[tuple[Run, int], list[Stretch]] = {}
        self._changed = index.listen()

    def clear(self) -> None:
        self._changed.clear()
        self._reported, self._was_cleared = {}, True

    def take(self, *, restart_points: bool = False) -> list[Event]:
        """Return the changes since the last call; all changes together give what each tier holds. `restart_points`:
        from this call on report these, too. All runs behind a changed one are looked at again for them."""
        self._note_grown()
        removed, stored, reported = list[Event](), list[Event](), dict[tuple[Run, int], list[Stretch]]()
        if restart_points and self._layout.sides and _RESTARTS not in self._kinds:
            self._kinds.append(_RESTARTS)
            self._changed.update(self._index.runs.values())
        if _RESTARTS in self._kinds and self._layout.bounded and self._changed:
            for run in self._index.runs.values():
                if run.parent in self._changed:
                    # A window may reach back to nodes before its run.
                    self._changed.add(run)
        # Parents first: their ids are lower.
        for run in sorted(self._changed, key=lambda run: run.id):
            for kind in self._kinds:
                before, now = self._reported.get((run, kind), []), self._residing(run, kind)
                if now != before:
                    reported[run, kind] = now
                    removed += self._events(run, kind, _without(before, now), are_stored=False)
                    stored += self._events(run, kind, _without(now, before))
        events: list[Event] = [Cleared()] if self._was_cleared else []
        # Only now that the reading is complete: one that fails half-way is made again.
        self._reported |= reported
        for key in [key for key, now in reported.items() if not now]:
            del self._reported[key]
        self._changed.clear()
        self._was_cleared = False
        return [*events, *removed[::-1], *stored]

    def snapshot(self) -> list[Event]:
        """What a new reader applies before it goes on with `take`: all that was reported and still holds."""
        reported = sorted(self._reported.items(), key=lambda item: (item[0][0].id, item[0][1]))
        return [event for (run, kind), parts in reported for event in self._events(run, kind, parts)]

    def _note_grown(self) -> None:
        """Note the open runs whose rows computed more nodes."""
        tables, index = self._tables, self._index
        is_due = (tables.next_event > 0) & (tables.num_computed >= tables.next_event)
        for row in is_due.nonzero()[0].tolist():
            path, due = index.paths[row], 0
            if path.open is not None:
                # A guarded run ends where another run hangs off it.
                length = index.confirmed_length(path.open)
                due = (path.published + length + 1) * tables.block_size
                self._changed.add(path.open)
            tables.next_event[row] = due

    def _residing(self, run: Run, kind: int) -> list[Stretch]:
        """The confirmed nodes of a run that reside in a place, or after which all groups can stand."""
        length = self._index.confirmed_length(run)
        if kind == _RESTARTS:
            parts = self._residing(run, DEVICE)
            return stretches(self._sides.can_stand(run, parts[0][1])) if parts else []
        if run.row >= 0 and kind == DEVICE:
            return [(0, length)] if length > 0 else []
        blocks = run.blocks[kind]
        return stretches(blocks[:length] >= 0) if len(blocks) and length > 0 else []

    def _events(self, run: Run, kind: int, parts: list[Stretch], *, are_stored: bool = True) -> list[Event]:
        """The events for these nodes of a run."""
        index, found = self._index, list[Event]()
        for start, stop in parts:
            hashes = tuple(index.digests(run, stop, start))
            if kind == _RESTARTS:
                for num_blocks, digest in enumerate(hashes, 1 + num_nodes(spans_to(run, start - 1))):
                    length = num_blocks * self._layout.block_size
                    found.append(RestartPoint(digest, length, self._layout.groups, are_stored))
            elif are_stored:
                tokens = np.frombuffer(index.run_tokens(run, start, stop), np.int32)
                *_, (top, _) = upwards(run, start)
                root, parent = top.key[: -index.block_bytes], index.digest_before(run, start)
                found.append(Stored(index.pools[kind].tier, hashes, parent, tokens, root))
            else:
                found.append(Removed(index.pools[kind].tier, hashes[::-1]))
        return found


def _without(parts: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """The parts of `parts` that are in none of `others`. Both rise."""
    for first, last in others:
        cut = [part for start, stop in parts for part in ((start, min(stop, first)), (max(start, last), stop))]
        parts = [part for part in cut if part[0] < part[1]]
    return parts
