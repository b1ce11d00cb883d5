"""Copies between places: rows that are swapped, and content that leaves the device and comes back on a hit.

    swap:     a row's blocks ── to the host ── and back
    offload:  evicted node ── not on the host yet ──> device → host        hit on it ── worth it ──> host → device

Full blocks are swapped as nodes: one that already resides at the other side is held there, not copied. Only what has no
node (a partial tail, everything without a prefix cache) gets a host block of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .growth import Growth
from .moves import NO_MOVES, NO_PAIRS, Moves, Pairs, pairs_of
from .pool import NO_BLOCKS, Taken
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, NUM_PLACES, Blocks, Node, Run, Span, last_of
from .tables import Rows, Tables

# A block that holds a row's tokens, and its node if it has one.
Entry = tuple[int, Node | None]


class Offload:
    """Plans copies of content that leaves the device and comes back; counts `offloaded_blocks` and `loaded_blocks`.
    Copies that were planned since the last `take_moves` run together. Until then the host blocks that they read or
    write are held, so that none is written twice, or read and written, by them."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        device, self._host = index.pools[:NUM_PLACES]
        device.on_eviction(self._evict)
        # Whether KV of positions start to stop - 1 is cheaper to load than to compute.
        self.is_worth_loading: Callable[[int, int], bool] = lambda start, stop: True
        # False while copies of an earlier batch may still have to run: they come first.
        self.is_open = True
        self.offloaded_blocks = self.loaded_blocks = 0
        # Sources and targets of copies to the host, and back.
        self._out: list[tuple[Blocks, Blocks]] = []
        self._in: list[tuple[Blocks, Blocks]] = []
        # Host blocks, released last one first.
        self._busy: list[Blocks] = []

    def load_where(self, is_worth_loading: Callable[[int, int], bool]) -> None:
        self.is_worth_loading = is_worth_loading

    def allow_copies(self, may_copy: bool) -> None:
        self.is_open = may_copy

    def _evict(self, taken: list[Taken], sources: Blocks) -> None:
        """Evict nodes of closed runs from these device blocks. Those not on the host are copied there while it has
        room; the others count as just used."""
        leaving = self._index.nodes_in(DEVICE, taken)
        if self._in:
            self._forget_loads(sources)
        if self.is_open:
            self._keep_on_host(leaving, sources)
        self._index.forget(DEVICE, leaving)

    def _keep_on_host(self, leaving: list[Span], sources: Blocks) -> None:
        new: list[Span] = []
        start = stop = 0
        for run, first, last in leaving:
            end = stop + last - first
            if run.is_any_there(HOST, first, last):
                # What goes before may evict this run's nodes from the host.
                self._copy_out(new, sources[start:stop])
                self._hold_or_copy(run, first, last, sources[stop:end])
                new, start = [], end
            else:
                new.append((run, first, last))
            stop = end
        self._copy_out(new, sources[start:stop])

    def _hold_or_copy(self, run: Run, first: int, stop: int, sources: Blocks) -> None:
        """Hold these nodes on the host, which has some of them, or copy them there."""
        if run.num_there(HOST, first, stop) == stop - first:
            self._hold(self._index.blocks_of(HOST, [(run, first, stop)]))
            return
        # One by one, because room for one may be made by evicting another.
        for at in range(stop - 1, first - 1, -1):
            block = run.block(HOST, at)
            if block >= 0:
                self._hold(np.array([block]))
            else:
                self._copy_out([(run, at, at + 1)], sources[stop - 1 - at : stop - at])

    def _hold(self, blocks: Blocks) -> None:
        self._host.hold(blocks)
        self._busy.append(blocks)

    def hold_sources(self, spans: list[Span]) -> Blocks:
        """Hold the host blocks of these nodes, in order, int64 [n], until the moves are taken: copies read them."""
        blocks = self._index.blocks_of(HOST, spans)
        self._hold(blocks)
        return blocks

    def keep_until_taken(self, blocks: Blocks) -> None:
        """Keep holding these host blocks, in order, until the moves are taken: copies read them."""
        self._busy.append(blocks)

    def load(self, sources: Blocks, blocks: Blocks) -> None:
        """Plan copies from held host blocks to device blocks, both int64 [n]."""
        self._in.append((sources, blocks))
        self.loaded_blocks += len(blocks)

    def held(self) -> Blocks:
        """Host blocks that copies not taken yet hold, one entry a reference, int64 [n]; for the checker."""
        return np.concatenate([NO_BLOCKS, *self._busy])

    def take_moves(self) -> Moves:
        """Return all copies planned since the last call; they run together, before any planned later."""
        if not self._busy:
            return NO_MOVES
        moves = Moves(_pairs(self._out), _pairs(self._in))
        busy, self._busy, self._out, self._in = self._busy, [], [], []
        for blocks in busy:
            self._host.release(blocks)
        return moves

    def _copy_out(self, spans: list[Span], sources: Blocks) -> None:
        """Plan copies of nodes that the host lacks from these device blocks, as far as there is room."""
        room = min(len(sources), self._host.num_available)
        if not room:
            return
        if room < len(sources):
            spans, sources = last_of(spans, room), sources[:room]
        blocks = self._index.draw_for(HOST, spans, room)
        self._out.append((sources, blocks))
        self._busy.append(blocks[::-1])
        self.offloaded_blocks += room

    def _forget_loads(self, blocks: Blocks) -> None:
        """Drop planned loads into these blocks: another row gets them before the copies ran."""
        kept = []
        for sources, targets in self._in:
            stays = ~np.isin(targets, blocks)
            self.loaded_blocks -= len(targets) - int(np.count_nonzero(stays))
            kept.append((sources[stays], targets[stays]))
        self._in = kept


class Tiers:
    """The host tails of swapped rows, and swaps both ways."""

    def __init__(self, tables: Tables, growth: Growth, index: PrefixIndex, offload: Offload | None) -> None:
        self._tables, self._pools = tables, index.pools
        self._growth, self._index, self._offload = growth, index, offload
        # row -> the host blocks of its columns from num_blocks on, in order.
        self.tails: dict[int, Blocks] = {}

    def num_on_host(self, row: int) -> int:
        return len(self.tails.get(row, ()))

    def host_blocks_wanted(self, rows: list[int], keep: int = 0) -> int:
        """Host blocks that `swap_out` of these rows would draw. Closes their open runs: their nodes go as nodes."""
        for row in rows:
            self._index.close_run(row)
        return self._num_wanted(HOST, [entry for row in rows for entry in self._entries_on_device(row, keep)])

    def device_blocks_wanted(self, rows: list[int]) -> int:
        """Device blocks that `swap_in` of these rows would take from the available ones. What several share counts
        once, a node that another row holds on the device not at all."""
        tails = [self.tails[row] for row in rows if row in self.tails]
        return self._num_wanted(DEVICE, self._entries_on_host(np.concatenate([NO_BLOCKS, *tails])))

    def swap_out(self, rows: Rows, keep: int) -> Moves:
        """Move blocks from column `keep` on to the host. Raises OutOfBlocks, changing no row or content; the rows' open
        runs are closed all the same."""
        tables = self._tables
        self._pools[HOST].require(self.host_blocks_wanted(rows.tolist(), keep))
        copied: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for row in rows.tolist():
            tail = self._moved_to(HOST, self._entries_on_device(row, keep), copied, pairs)
            self.tails[row] = np.concatenate([tail, self.tails.get(row, NO_BLOCKS)])
        for row in rows.tolist():
            # Lookahead blocks hold nothing to bring back.
            self._growth.give_back(row, min(keep, -(-int(tables.num_launched[row]) // tables.block_size)))
            tables.reserved[row] = 0
            tables.is_swapped[row] = True
        return Moves(device_to_host=pairs_of(pairs))

    def swap_in(self, rows: Rows) -> Moves:
        """Move the host tails back. Raises OutOfBlocks, changing nothing."""
        tables, host = self._tables, self._pools[HOST]
        self._pools[DEVICE].require(self.device_blocks_wanted(rows.tolist()))
        for row in rows.tolist():
            # Before any tail is popped: this may raise MemoryError.
            tables.ensure_columns(int(tables.num_blocks[row]) + len(self.tails[row]))
        copied: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        returned = [self.tails.pop(row) for row in rows.tolist()]
        for row, tail in zip(rows.tolist(), returned, strict=True):
            blocks = self._moved_to(DEVICE, self._entries_on_host(tail), copied, pairs)
            if len(blocks):
                self._growth.write(row, int(tables.num_blocks[row]), blocks)
            tables.is_swapped[row] = False
        for tail in returned:
            if self._offload is not None:
                # Content that this evicted to the host must not overwrite what these copies read.
                self._offload.keep_until_taken(tail)
            else:
                host.release(tail)
        return Moves(host_to_device=pairs_of(pairs))

    def trim(self, row: int, keep: int) -> None:
        """Cut the swapped row to its first `keep` blocks, on the device and then on the host."""
        tail, on_host = self.tails[row], max(keep - int(self._tables.num_blocks[row]), 0)
        if on_host:
            self.tails[row] = tail[:on_host]
        else:
            del self.tails[row]
            self._tables.is_swapped[row] = False
        self._pools[HOST].release(tail[on_host:])

    def tail_is_node(self, row: int, column: int) -> bool:
        place = column - int(self._tables.num_blocks[row])
        tail = self.tails[row]
        return 0 <= place < len(tail) and bool(self._pools[HOST].has_content(tail[place]))

    def _entries_on_device(self, row: int, keep: int) -> list[Entry]:
        """The row's device blocks from column `keep` on that hold launched tokens."""
        tables, path = self._tables, self._index.paths[row]
        nodes = [(run, at) for run, first, stop in path.spans(keep) for at in range(first, stop)]
        nodes += self._index.nodes_of_forks(row)[max(0, keep - path.published) :]
        stop = min(-(-int(tables.num_launched[row]) // tables.block_size), int(tables.num_blocks[row]))
        blocks = tables.blocks[0, row, keep:stop].tolist()
        return [(block, nodes[i] if i < len(nodes) else None) for i, block in enumerate(blocks)]

    def _entries_on_host(self, tail: Blocks) -> list[Entry]:
        return list(zip(tail.tolist(), self._index.node_of_each(HOST, tail), strict=True))

    def _block_of(self, place: int, node: Node | None) -> int:
        return -1 if node is None else self._index.block(place, *node)

    def _num_wanted(self, place: int, entries: list[Entry]) -> int:
        """Blocks of a place that `_moved_to` would take from the available ones."""
        wanted: set[Node | int] = set()
        for source, node in entries:
            there = self._block_of(place, node)
            # Holding a cached block takes it out of what is available, as a draw does.
            if there < 0 or self._pools[place].num_refs(there) == 0:
                wanted.add(source if node is None else node)
        return len(wanted)

    def _moved_to(
        self, place: int, entries: list[Entry], copied: dict[int, int], pairs: list[tuple[int, int]]
    ) -> Blocks:
        """Hold or draw a block of a place for each of these, int64 [n]; add the copies to `pairs`, those of blocks
        without a node to `copied` (source → target), too."""
        blocks: list[int] = []
        for source, node in entries:
            # The common partial block of forked rows travels once.
            block = copied.get(source, -1) if node is None else self._block_of(place, node)
            if block >= 0:
                self._pools[place].hold(np.array([block]))
            else:
                if node is None:
                    block = copied[source] = self._pools[place].draw(1).item()
                else:
                    block = self._index.draw_for(place, [(*node, node[1] + 1)], 1).item()
                pairs.append((source, block))
            blocks.append(block)
        return np.array(blocks, np.int64)


def _pairs(parts: list[tuple[Blocks, Blocks]]) -> Pairs:
    if not parts:
        return NO_PAIRS
    sources, targets = (np.concatenate(side) for side in zip(*parts, strict=True))
    return np.stack([sources, targets], axis=1).astype(np.int32)
