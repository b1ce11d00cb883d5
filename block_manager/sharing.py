"""Sharing by content: hits, the rows that share what their own batch still computes, and duplicates that are given back.

    a batch  | leader: block 7 pending | sharer: block 7 from column 2 on |
    computed → block 7 is a node for both;  cancelled → the sharer's table ends before column 2

Knows the prefix index, and who shares what is not confirmed. Does not know requests; used only with a prefix cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from block_manager.errors import RowInFlight
from block_manager.growth import Growth
from block_manager.offload import Offload
from block_manager.pool import Pool
from block_manager.prefix_index import Match, PrefixIndex
from block_manager.runs import Run
from block_manager.tables import Rows, Tables
from block_manager.tiers import Tiers


class Sharer(NamedTuple):
    """A row that took blocks which another row of the same batch was still computing, the first of them at `column`."""

    row: int
    uid: int
    column: int
    is_counted: bool


def truncate_table(tables: Tables, growth: Growth, tiers: Tiers, row: int, keep: int) -> None:
    """The row's table ends at column `keep`; nothing behind it is kept on the host, and num_computed falls with it."""
    if tables.is_swapped[row]:
        tiers.drop(row)
    tables.num_computed[row] = min(int(tables.num_computed[row]), keep * tables.block_size)
    growth.give_back(row, keep)
    tables.reserved[row] = min(int(tables.reserved[row]), keep)


def first_of(segments: list[tuple[Run, int, int]], num_blocks: int) -> list[tuple[Run, int, int]]:
    """The first so many nodes of segments (run, offset, count)."""
    found: list[tuple[Run, int, int]] = []
    for run, offset, count in segments:
        if num_blocks > 0:
            found.append((run, offset, min(count, num_blocks)))
        num_blocks -= count
    return found


class Sharing:
    """Takes hits, publishes, switches and rolls back. Counts hit tokens: `hit_tokens`, and of them `pending_hit_tokens` and `host_hit_tokens`."""

    def __init__(
        self,
        tables: Tables,
        device: Pool,
        index: PrefixIndex,
        growth: Growth,
        tiers: Tiers,
        offload: Offload | None,
    ) -> None:
        self._tables = tables
        self._offload = offload
        self._device = device
        self._index = index
        self._growth = growth
        self._tiers = tiers
        self._sharers: dict[int, list[Sharer]] = {}
        self._lost_hits: dict[int, int] = {}
        self.hit_tokens = self.pending_hit_tokens = self.host_hit_tokens = 0

    def extend_hit(self, row: int, *, count: bool = True, first_is_known: bool = False, room: int | None = None) -> int:
        """Look up what follows the row's blocks, which all are nodes, and take what is found. Returns the tokens won.

        What only the host has is loaded, into `room` blocks at most (None: as many as there are), where that is worth it.

        Does nothing for a row with blocks beyond its nodes: what it has computed itself it need not find. With `first_is_known`
        the caller has seen that some run begins with the row's first block.
        """
        index, tables = self._index, self._tables
        path = index.paths[row]
        if path.open is None and path.published < tables.full_blocks(row):
            # What it computed could not become nodes while another batch had the same ones pending; now that may have ended.
            self.publish(row)
        have = path.published
        if path.open is not None or tables.num_blocks[row] != have or not path.reads:
            return 0
        size = tables.block_size
        limit = (int(tables.num_tokens[row]) - 1) // size - have
        if limit <= 0:
            return 0
        if not first_is_known and path.run is None and not index.has_first(path.root, tables.block_bytes(row, 0)):
            # Most new prompts share nothing, and their first block says so.
            return 0
        data = tables.tokens[row, have * size : (have + limit) * size].tobytes()
        if self._offload is not None:
            # What is promised comes first: nothing that is found now may be evicted by it.
            self._growth.draw_promised()
        match = index.match(path, path.root, data, limit)
        on_host = []
        if self._offload is not None and self._offload.is_open and match.first_pending < 0 and match.num_blocks < limit:
            on_host = index.match_on_host(path, path.root, data, limit, match)
        won = self._take(row, have, match, count) if match.num_blocks else 0
        if on_host:
            loaded = self._load(row, on_host, room)
            won += loaded
            if count:
                self.hit_tokens += loaded
                self.host_hit_tokens += loaded
        return won

    def _take(self, row: int, have: int, match: Match, count: bool) -> int:
        """The row, which has `have` blocks, shares what was found on the device. Returns the tokens won."""
        index, tables, size = self._index, self._tables, self._tables.block_size
        if match.first_pending >= 0:
            # Blocks that are still to be computed may still be to be drawn. The caller has seen that nothing is evicted by that.
            self._growth.draw_promised()
        tables.ensure_columns(have + match.num_blocks)
        blocks = index.blocks_of(match)
        self._device.hold(blocks)
        self._growth.write(row, have, blocks)
        index.follow(row, match)
        stop = have + match.num_blocks
        tables.num_computed[row] = stop * size
        if match.first_pending >= 0:
            self._sharers.setdefault(index.batch, []).append(
                Sharer(row, int(tables.uid[row]), match.first_pending, count)
            )
            if count:
                self.pending_hit_tokens += (stop - match.first_pending) * size
        if count:
            self.hit_tokens += match.num_blocks * size
        return match.num_blocks * size

    def _load(self, row: int, segments: list[tuple[Run, int, int]], room: int | None) -> int:
        """The row gets device blocks for nodes that follow its own and that only the host has; they are copied there. Returns the
        tokens won."""
        index, tables, device, offload = self._index, self._tables, self._device, self._offload
        assert offload is not None, "content is on the host alone only where it is offloaded"
        have, size = int(tables.num_blocks[row]), tables.block_size
        num_blocks = min(sum(count for _, _, count in segments), device.num_available)
        if room is not None:
            num_blocks = min(num_blocks, room)
        if num_blocks <= 0 or not offload.is_worth_loading(have * size, (have + num_blocks) * size):
            return 0
        tables.ensure_columns(have + num_blocks)
        segments = first_of(segments, num_blocks)
        # Held first: what is evicted by the draw goes to the host, too.
        sources = offload.hold_sources(segments)
        blocks = device.draw(num_blocks)
        offload.load(sources, blocks)
        start = 0
        for run, offset, count in segments:
            index.reside_all(run, offset, blocks[start : start + count])
            start += count
        self._growth.write(row, have, blocks)
        index.step_on(row, segments[-1], num_blocks)
        tables.num_computed[row] = (have + num_blocks) * size
        return num_blocks * size

    def publish(self, row: int) -> None:
        """The row's confirmed full blocks become nodes; a duplicate of one that is on the device already is given back."""
        for column, run, at in self._index.publish(row):
            self._switch(row, column, self._index.device_block(run, at))

    def _switch(self, row: int, column: int, block: int) -> None:
        """Every table that names the row's block at `column`, a duplicate of `block`, names that one instead."""
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

    def cancel(self, row: int) -> None:
        """What is in flight for the row was not computed; whoever shares it loses it, too."""
        tables, index = self._tables, self._index
        batch = int(tables.batch[row])
        first = int(tables.num_computed[row]) // tables.block_size
        unconfirmed = set(tables.blocks[0, row, first : tables.num_blocks[row]].tolist())
        for sharer in reversed(self._sharers.get(batch, [])):
            if sharer.row != row and tables.uid[sharer.row] == sharer.uid:
                held = tables.blocks[0, sharer.row, sharer.column : tables.num_blocks[sharer.row]].tolist()
                if not unconfirmed.isdisjoint(held):
                    self._roll_back(sharer)
        tables.num_scheduled[row] = 0
        tables.batch[row] = 0
        index.withdraw(row)
        keep = max(-(-int(tables.num_computed[row]) // tables.block_size), int(tables.reserved[row]))
        self._growth.give_back(row, keep)

    def _roll_back(self, sharer: Sharer) -> None:
        row, tables = sharer.row, self._tables
        if tables.batch[row]:
            self.cancel(row)
        self._lost_hits.setdefault(row, 0)
        if tables.num_blocks[row] > sharer.column:
            if sharer.is_counted:
                lost = (self._index.paths[row].published - sharer.column) * tables.block_size
                self.hit_tokens -= lost
                self.pending_hit_tokens -= lost
                self._lost_hits[row] += lost
            self.truncate(row, sharer.column)

    def require_whole(self, batches: set[int], rows: Rows) -> None:
        """Raise RowInFlight when a row of these batches is not among `rows` while others share what their batch computes."""
        for batch in batches & self._sharers.keys():
            left_out = np.setdiff1d((self._tables.batch == batch).nonzero()[0], rows)
            if len(left_out):
                raise RowInFlight(int(left_out[0]), " Rows of its batch share blocks, so the batch is confirmed whole.")

    def require_confirmed_below(self, batches: set[int], rows: Rows) -> None:
        """Raise RowInFlight when one of `rows`, which are in flight in these batches, stands on a node that another batch is computing.

        Were it confirmed first, its own nodes would outlive the one they hang off when that batch is cancelled.
        """
        index, listed = self._index, set(rows.tolist())
        for batch in self._sharers.keys() - batches:
            for sharer in self._sharers[batch]:
                if sharer.row in listed and self._tables.uid[sharer.row] == sharer.uid:
                    path = index.paths[sharer.row]
                    leader = path.run.row if path.run is not None else -1
                    if leader >= 0 and path.run is not None and path.at >= index.confirmed_length(path.run):
                        raise RowInFlight(
                            leader, f" Row {sharer.row} stands on what it computes, and is confirmed after it."
                        )

    def take_lost_hits(self) -> dict[int, int]:
        """For each row that was rolled back since the last call, the hit tokens that it gave up and that had been counted."""
        lost, self._lost_hits = self._lost_hits, {}
        return lost

    def share_fork(self, row: int, child: int) -> None:
        """The child shares what the row shares, confirmed or not."""
        ours, uid = int(self._tables.uid[row]), int(self._tables.uid[child])
        for sharers in self._sharers.values():
            columns = [sharer.column for sharer in sharers if sharer.row == row and sharer.uid == ours]
            sharers.extend([Sharer(child, uid, column, False) for column in columns])

    def forget_sharers(self, batch: int) -> None:
        """The batch has ended as computed: what its rows shared of one another is confirmed."""
        self._sharers.pop(batch, None)

    def truncate(self, row: int, keep: int) -> None:
        """The row gives up its blocks from column `keep` on, and all it has on the host."""
        if keep == self._tables.num_blocks[row] and not self._tables.is_swapped[row]:
            return
        self._index.close_run(row)
        self._index.paths[row].truncate(keep)
        truncate_table(self._tables, self._growth, self._tiers, row, keep)

    def is_unconfirmed(self, row: int) -> bool:
        """Whether the row shares a block that a batch which has not ended is still computing."""
        uid = self._tables.uid[row]
        return any(sharer.row == row and sharer.uid == uid for sharers in self._sharers.values() for sharer in sharers)
