"""Sharing by content, with a prefix cache: hits, rows that share what a batch still computes, and duplicates released.

batch 7  | leader: block 3 pending |        batch 7 or 8  | sharer: block 3 from column 2 on |
7 is computed → block 3 is a node for both;  7 is cancelled → the sharer's table ends before column 2
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .flights import Flight, Flights
from .growth import Growth
from .pool import Pool
from .prefix_index import Match, PrefixIndex
from .runs import DEVICE, HOST, Span, first_of, num_nodes
from .tables import Tables
from .tiers import Offload, Tiers


class Sharer(NamedTuple):
    """A row that shares blocks which a batch was still computing for another row, the first of them at `column`."""

    row: int
    uid: int
    column: int
    is_counted: bool


def truncate_table(tables: Tables, flights: Flights, growth: Growth, tiers: Tiers, row: int, keep: int) -> None:
    """End the row's table at column `keep`, on the host if it is swapped; its watermarks fall with it."""
    if tables.is_swapped[row]:
        tiers.trim(row, keep)
    flights.clip(row, keep * tables.block_size)
    tables.fall_back(row, keep * tables.block_size)
    growth.give_back(row, keep)
    tables.reserved[row] = min(int(tables.reserved[row]), keep)


class Sharing:
    """Takes hits, publishes, switches and rolls back. Counts `hit_tokens`, and of them the pending and the host's."""

    def __init__(
        self,
        tables: Tables,
        flights: Flights,
        device: Pool,
        index: PrefixIndex,
        growth: Growth,
        tiers: Tiers,
        offload: Offload | None,
    ) -> None:
        self._tables = tables
        self._flights = flights
        self._offload = offload
        self._device = device
        self.index = index
        self._growth = growth
        self._tiers = tiers
        # By the batch in which they were found: when it has run, so have all that they depend on.
        self._sharers: dict[int, list[Sharer]] = {}
        self._lost_hits: dict[int, int] = {}
        self.hit_tokens = self.pending_hit_tokens = self.host_hit_tokens = 0

    def extend_hit(self, row: int, *, count: bool = True, first_is_known: bool = False, room: int | None = None) -> int:
        """Look up what follows the row's blocks and take what is found. Returns the tokens won. Does nothing for a row
        in flight, or with blocks beyond its nodes: it need not find what it has computed. Content that only the host
        has is loaded where that is worth it, into `room` blocks at most (None: as many as can be drawn).
        `first_is_known`: a run is known to begin with the row's first block."""
        index, tables = self.index, self._tables
        path = index.paths[row]
        if tables.num_launched[row] != tables.num_computed[row]:
            return 0
        if path.open is None and path.published < tables.full_blocks(row):
            # Another batch may have had the same blocks pending, and may have ended.
            self.publish(row)
        have = path.published
        if path.open is not None or tables.num_blocks[row] != have or not path.reads:
            return 0
        size = tables.block_size
        limit = (int(tables.num_tokens[row]) - 1) // size - have
        if limit <= 0:
            return 0
        if not first_is_known and path.run is None and not index.has_first(path.root, tables.block_bytes(row, 0)):
            # The first block of most new prompts is not cached.
            return 0
        data = tables.tokens[row, have * size : (have + limit) * size].tobytes()
        if self._offload is not None:
            # First, so that it evicts nothing that is found now.
            self._growth.draw_promised()
        match = index.match(path, path.root, data, limit)
        on_host: list[Span] = []
        if self._offload is not None and self._offload.is_open and match.first_pending < 0 and match.num_blocks < limit:
            on_host = index.match(path, path.root, data, limit, HOST, match).spans
        won = self._take(row, have, match, count) if match.num_blocks else 0
        if on_host:
            loaded = self._load(row, on_host, room)
            won += loaded
            if count:
                self.hit_tokens += loaded
                self.host_hit_tokens += loaded
        return won

    def _take(self, row: int, have: int, match: Match, count: bool) -> int:
        """Share what was found on the device with the row, which has `have` blocks. Returns the tokens won."""
        index, tables, size = self.index, self._tables, self._tables.block_size
        if match.first_pending >= 0:
            # Pending blocks may be promised only. The caller has seen that drawing them evicts nothing.
            self._growth.draw_promised()
        tables.ensure_columns(have + match.num_blocks)
        blocks = index.blocks_of(DEVICE, match.spans)
        self._device.hold(blocks)
        self._growth.write(row, have, blocks)
        index.step_on(row, match.spans[-1], match.num_blocks)
        stop = have + match.num_blocks
        tables.set_progress(row, stop * size)
        if match.first_pending >= 0:
            self._sharers.setdefault(index.batch, []).append(
                Sharer(row, int(tables.uid[row]), match.first_pending, count)
            )
            if count:
                self.pending_hit_tokens += (stop - match.first_pending) * size
        if count:
            self.hit_tokens += match.num_blocks * size
        return match.num_blocks * size

    def _load(self, row: int, spans: list[Span], room: int | None) -> int:
        """Draw device blocks for nodes after the row's that only the host has; plan copies. Returns the tokens won."""
        index, tables, device, offload = self.index, self._tables, self._device, self._offload
        assert offload is not None, "content is on the host alone only where it is offloaded"
        have, size = int(tables.num_blocks[row]), tables.block_size
        num_blocks = min(num_nodes(spans), device.num_available)
        if room is not None:
            num_blocks = min(num_blocks, room)
        if num_blocks <= 0 or not offload.is_worth_loading(have * size, (have + num_blocks) * size):
            return 0
        tables.ensure_columns(have + num_blocks)
        spans = first_of(spans, num_blocks)
        # Held first: the draw may evict content to the host.
        sources = offload.hold_sources(spans)
        blocks = device.draw(num_blocks)
        offload.load(sources, blocks)
        column = 0
        for run, first, stop in spans:
            index.reside(DEVICE, run, first, blocks[column : column + stop - first])
            column += stop - first
        self._growth.write(row, have, blocks)
        index.step_on(row, spans[-1], num_blocks)
        tables.set_progress(row, (have + num_blocks) * size)
        return num_blocks * size

    def publish(self, row: int) -> None:
        """Make nodes of the row's confirmed full blocks; release duplicates of nodes on the device."""
        for column, run, at in self.index.publish(row):
            self._switch(row, column, self.index.block(DEVICE, run, at))

    def _switch(self, row: int, column: int, block: int) -> None:
        """Replace the row's block at `column`, a duplicate of `block`, in every table that names it."""
        tables = self._tables
        duplicate = int(tables.blocks[0, row, column])
        rows = [row]
        if self._device.num_refs(duplicate) > 1:
            # Shared blocks stand at the same column in every table.
            live = tables.live_rows
            names_it = (tables.blocks[0, live, column] == duplicate) & (tables.num_blocks[live] > column)
            rows = live[names_it].tolist()
        new, old = np.array([block]), np.array([duplicate])
        for other in rows:
            self._device.hold(new)
            self._growth.write(other, column, new)
            self._device.release(old)

    def cut_sharers(self, flight: Flight) -> None:
        """Truncate rows that share what the batch, the latest one, was to compute, at the first such node."""
        lost = self.index.nodes_lost(flight)
        if not lost:
            return
        starts = {share.row: share.start for share in flight.shares()}
        for sharer in [sharer for sharers in self._sharers.values() for sharer in sharers]:
            row = sharer.row
            if self._tables.uid[row] != sharer.uid:
                continue
            column = self.index.first_on(row, lost)
            # What a row was to compute itself falls back with its own share.
            if column >= 0 and (row not in starts or column < starts[row] // self._tables.block_size):
                self._cut(sharer, column)

    def _cut(self, sharer: Sharer, column: int) -> None:
        row = sharer.row
        self._lost_hits.setdefault(row, 0)
        if sharer.is_counted:
            lost = (self.index.paths[row].published - column) * self._tables.block_size
            self.hit_tokens -= lost
            self.pending_hit_tokens -= lost
            self._lost_hits[row] += lost
        self.truncate(row, column)

    def take_lost_hits(self) -> dict[int, int]:
        """Return the counted hit tokens of each row that was rolled back since the last call."""
        lost, self._lost_hits = self._lost_hits, {}
        return lost

    def share_fork(self, row: int, child: int) -> None:
        """Let the child share what the row shares, confirmed or not."""
        ours, uid = int(self._tables.uid[row]), int(self._tables.uid[child])
        for sharers in self._sharers.values():
            columns = [sharer.column for sharer in sharers if sharer.row == row and sharer.uid == ours]
            sharers.extend([Sharer(child, uid, column, False) for column in columns])

    def forget_sharers(self, batch: int) -> None:
        """Forget the sharers of the batch, which ran, and those found for earlier numbers, which were never put out."""
        for number in [number for number in self._sharers if number <= batch]:
            del self._sharers[number]

    def hand_down(self, batch: int) -> None:
        """Give the sharers of the latest batch, which is cancelled, to the one before it."""
        sharers, outstanding = self._sharers.pop(batch, []), self._flights.outstanding
        if sharers and outstanding:
            self._sharers.setdefault(outstanding[-1].number, []).extend(sharers)

    def truncate(self, row: int, keep: int) -> None:
        """Release the row's blocks from column `keep` on, on either tier."""
        tables = self._tables
        if keep == tables.num_blocks[row] and not tables.is_swapped[row]:
            return
        self.index.close_run(row)
        self.index.paths[row].truncate(keep)
        truncate_table(tables, self._flights, self._growth, self._tiers, row, keep)

    def is_unconfirmed(self, row: int) -> bool:
        """Whether the row shares a block that a batch which has not ended is still computing."""
        uid = self._tables.uid[row]
        return any(sharer.row == row and sharer.uid == uid for sharers in self._sharers.values() for sharer in sharers)
