"""Copies between places: rows that are swapped, and content that leaves the device and comes back on a hit.

    swap:     blocks of a row ──> host ──> device
    offload:  evicted node, not on the host yet ──> host        hit on it, if worth a load ──> device

Full blocks are swapped as nodes: one that already resides where it is to go is held there, not copied. Only what has no
node gets a host block of its own: a partial tail, windows and states, and everything without a prefix cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from .growth import Growth
from .moves import Moves, pairs_of
from .pool import DOUBLED, Pool
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, NUM_PLACES, Blocks, Node, Run, Span, num_nodes, spans_where, stretches
from .side_content import Part, SideContent
from .tables import Rows

# `BlockManager.load_where`.
IsWorthLoading = Callable[[int, int, int], bool]
# A block with tokens of a row, and its node if it has one.
Entry = tuple[int, Node | None]


class Offload:
    """Plans copies of content that leaves the device and comes back. Counts `offloaded_blocks` and `loaded_blocks`, in
    pages."""

    def __init__(self, index: PrefixIndex, growth: Growth) -> None:
        self._index, self._growth, self._copies = index, growth, growth.copies
        # The pools that have pages: the last place is always one of them, on the host.
        self._device, self._host = growth.device, index.pools[-1]
        self._pages = growth.layout.pages_of_place
        self._device.on_eviction(self._evict)
        # (start, stop, pages): does it cost less to copy these pages than to compute positions `start` to `stop` - 1?
        self.is_worth_loading: IsWorthLoading = lambda start, stop, pages: True
        self.offloaded_blocks = self.loaded_blocks = 0

    def load_where(self, is_worth_loading: IsWorthLoading) -> None:
        self.is_worth_loading = is_worth_loading

    def _evict(self, taken: list[Blocks], sources: Blocks) -> None:
        """Evict nodes of closed runs from these device blocks. Copy to the host what it lacks, while it has room."""
        index = self._index
        self.loaded_blocks -= self._copies.forget_loads(sources)
        for place, parts, blocks in index.by_place(len(index.pools) - NUM_PLACES, taken, sources):
            if index.has_sides and not (stays := self._device.has_content(blocks)).all():
                # Making room on the host for other content took the content of some of these blocks.
                blocks = blocks[stays]
                parts = [blocks]
            leaving = index.nodes_in(place, parts)
            if self._copies.may_copy_content and place < NUM_PLACES:
                self._keep_on_host(place, leaving, blocks)
            elif self._copies.may_copy_content and self._device.goes_next is not None:
                # Blocks that were released to go next are worth no copy.
                wanted = blocks[~self._device.goes_next[blocks]]
                self._keep_on_host(place, index.nodes_in(place, [wanted]), wanted)
            index.forget(place, leaving)

    def _keep_on_host(self, place: int, leaving: list[Span], sources: Blocks) -> None:
        """Hold those of these nodes that the host has, and copy the others there. `sources`: their device blocks."""
        start, there = 0, place + HOST
        for run, first, stop in leaving:
            of_run, start = sources[start : start + stop - first], start + stop - first
            while stop > first:
                # From the end, one stretch of one level after the other: making room for one may evict another.
                blocks = run.blocks_in(there, first, stop)
                levels = np.where(blocks >= 0, DOUBLED, self._device.level[of_run[::-1]])
                begin, _ = stretches(levels == levels[-1])[-1]
                if blocks[-1] >= 0:
                    self._copies.hold(there, blocks[begin:])
                else:
                    self._copy_out(place, run, first + begin, stop, of_run[: stop - first - begin])
                of_run, stop = of_run[stop - first - begin :], first + begin

    def load(self, spans: list[Span], place: int = DEVICE) -> Blocks:
        """Load nodes that only the host has: draw device blocks, plan copies. Returns blocks in order, int64 [n]."""
        sources, pages = self._index.blocks_of(place + HOST, spans), self._pages[place]
        # Hold first: the draw may evict content to the host.
        self._copies.hold(place + HOST, sources)
        blocks, start = self._index.pools[place].draw(len(sources), pages), 0
        for run, first, stop in spans:
            self._index.reside(place, run, first, blocks[start : start + stop - first])
            start += stop - first
        self._copies.plan_in(place, sources, blocks, pages)
        self.loaded_blocks += len(blocks) * pages
        return blocks

    def bring(self, parts: list[Part]) -> list[tuple[int, Blocks]]:
        """Hold the device blocks of these parts, and load what only the host has. Returns (place, blocks) to release
        later. If there is no room, returns nothing and changes nothing."""
        index, wanted, lacking = self._index, 0, list[tuple[int, list[Span]]]()
        for place, spans, blocks in parts:
            missing = spans_where(spans, blocks == -1)
            lacking.append((place, missing))
            # A cached block that is held is no longer available.
            num = num_nodes(missing) + int(np.count_nonzero(index.pools[place].state[blocks[blocks >= 0]] < 0))
            wanted += num * self._pages[place]
        if wanted > self._growth.num_unpromised:
            return []
        held = [(place, blocks[blocks >= 0]) for place, _, blocks in parts]
        for (place, blocks), (_, missing) in zip(held, lacking, strict=True):
            index.pools[place].hold(blocks)
            self._copies.hold(place + HOST, index.blocks_of(place + HOST, missing))
        for place, missing in lacking:
            blocks = self.load(missing, place)
            held.append((place, blocks))
            for block in blocks.tolist() if place >= NUM_PLACES else ():
                # This block must not be drawn before the copies ran, even if the full group loses its node.
                self._copies.hold_source(place, block)
        return held

    def _copy_out(self, place: int, run: Run, first: int, stop: int, sources: Blocks) -> None:
        """Copy these nodes, of one level, to the host, which lacks them; if room is short, the last ones. Content that is
        retained at a higher level makes no room. `sources`: last first."""
        pages, level = self._pages[place], self._device.level.item(sources[0])
        if not (room := min(len(sources), self._host.num_available_to(level) // pages)):
            return
        first = stop - room
        sources = sources[:room]
        if self._index.has_sides:
            self._host.make_room(room * pages)
            if not self._device.has_content(sources).all():
                # Making room took their content, too.
                return
        blocks = self._index.draw_for(place + HOST, run, first, stop, pages)
        self._copies.plan_out(place, sources, blocks, pages)
        self._copies.take_over(place + HOST, blocks[::-1])
        self.offloaded_blocks += room * pages


class Tiers:
    """Swaps of rows, and the host tails of swapped rows. Such a row keeps its fronts; its states go with block 0."""

    def __init__(self, growth: Growth, index: PrefixIndex, offload: Offload | None, sides: SideContent) -> None:
        self._growth, self._index, self.offload, self._sides = growth, index, offload, sides
        self._tables, self._layout = growth.tables, growth.layout
        # By table: pages of a block, and whether rows may share it. A state is overwritten: each row gets its own.
        sides_of = self._layout.sides
        self._kinds = [(self._layout.full_pages, True), *((side.pages, not side.is_state) for side in sides_of)]
        # By row and table: the host blocks of its last columns, in order. The full group's begin at column num_blocks.
        self.tails: dict[int, list[Blocks]] = {}

    def num_on_host(self, row: int) -> int:
        """How many columns of the row lie on the host."""
        return len(self.tails[row][0]) if row in self.tails else 0

    def pages_on_host(self, row: int) -> int:
        return sum(pages * len(tail) for (pages, _), tail in zip(self._kinds, self.tails.get(row, ()), strict=False))

    def pool(self, place: int, table: int) -> Pool:
        """The pool of a table's blocks, on the device or the host."""
        return self._index.pools[NUM_PLACES * table + place]

    def host_pages_wanted(self, rows: list[int], keep: int = 0) -> int:
        """Host pages that `swap_out` of these rows would draw. Closes their open runs, so that they go as nodes."""
        for row in rows:
            self._index.close_run(row)
        return self._pages_wanted(HOST, [self._entries_on_device(row, keep) for row in rows])

    def device_pages_wanted(self, rows: list[int]) -> int:
        """Available device pages that `swap_in` of these rows would take. What several share counts once; a node that
        another row holds on the device does not count."""
        return self._pages_wanted(DEVICE, [self._entries_on_host(self.tails[row]) for row in rows if row in self.tails])

    def swap_out(self, rows: Rows, keep: int) -> Moves:
        """Move the rows' blocks from column `keep` on to the host. Raises OutOfBlocks. Closes open runs in any case."""
        tables = self._tables
        self._index.pages(HOST).require(self.host_pages_wanted(rows.tolist(), keep))
        copied, pairs = defaultdict[int, dict[int, int]](dict), list[tuple[int, int]]()
        for row in rows.tolist():
            tails = self._moved_to(HOST, self._entries_on_device(row, keep), copied, pairs)
            if row in self.tails:
                tails = [np.concatenate(both) for both in zip(tails, self.tails[row], strict=True)]
            self.tails[row] = tails
        for row in rows.tolist():
            pairs = self._growth.copies.read_at_sources(row, pairs)
            if not keep:
                self._sides.keep_all(row)
            first = tables.first[:, row].copy()
            # Lookahead blocks hold nothing that is to come back.
            self._growth.give_back(row, min(keep, -(-tables.num_launched.item(row) // tables.block_size)))
            for table, column in enumerate(first):
                tables.set_first(table, row, column)
            if not keep:
                tables.let_move(row, False)
            tables.reserved[row] = 0
            tables.is_swapped[row] = True
        return Moves(device_to_host=pairs_of(pairs))

    def swap_in(self, rows: Rows) -> Moves:
        """Move the host tails of these rows back, of those that have one. Raises OutOfBlocks, changing nothing."""
        tables = self._tables
        rows = rows[tables.is_swapped[rows]]
        self._index.pages(DEVICE).require(self.device_pages_wanted(rows.tolist()))
        for row in rows.tolist():
            # Before a tail is taken out: this may raise MemoryError.
            tables.ensure_columns(int(tables.num_blocks[row]) + self.num_on_host(row))
        copied, pairs = defaultdict[int, dict[int, int]](dict), list[tuple[int, int]]()
        returned = [self.tails.pop(row) for row in rows.tolist()]
        for row, tails in zip(rows.tolist(), returned, strict=True):
            blocks, *of_sides = self._moved_to(DEVICE, self._entries_on_host(tails), copied, pairs)
            if len(blocks):
                self._growth.write(row, int(tables.num_blocks[row]), blocks)
            for side, its in zip(self._layout.sides, of_sides, strict=True):
                stop = len(its) if side.is_state else int(tables.num_blocks[row])
                tables.put(side.table, row, slice(stop - len(its), stop), its)
            tables.is_swapped[row] = False
        for row, tails in zip(rows.tolist(), returned, strict=True):
            # Not before all rows are back: forks share a partial block.
            self._growth.note_shared_tail(row)
            for table, tail in enumerate(tails):
                if self.offload is None:
                    self.pool(HOST, table).release(tail)
                else:
                    # What these draws evicted to the host must not overwrite what these copies read.
                    self._growth.copies.take_over(NUM_PLACES * table + HOST, tail)
        return Moves(host_to_device=pairs_of(pairs))

    def trim(self, row: int, keep: int) -> None:
        """Release the swapped row's host blocks from column `keep` on. With none left the row is swapped no more."""
        tables, tails, have = self._tables, self.tails[row], int(self._tables.num_blocks[row])
        stop = have + len(tails[0])
        for table, ((_, is_shared), tail) in enumerate(zip(self._kinds, tails, strict=True)):
            # A state stays while any block stays.
            stays = max(keep - stop + len(tail), 0) if is_shared else min(keep, len(tail))
            self.pool(HOST, table).release(tail[stays:])
            tails[table] = tail[:stays]
            tables.set_first(table, row, min(tables.first.item(table, row), max(keep, have)))
        if keep <= have:
            del self.tails[row]
            tables.is_swapped[row] = False

    def give_back_fronts(self, rows: Rows) -> None:
        """Release host blocks that windows and chunks of these rows have passed, by computed tokens."""
        tables = self._tables
        for row in rows[tables.is_swapped[rows]].tolist():
            tails = self.tails[row]
            stop = int(tables.num_blocks[row]) + len(tails[0])
            for side in self._layout.bounded:
                tail, end = tails[side.table], min(int(side.first_column(tables.num_computed[row])), stop)
                if (num_passed := end - stop + len(tail)) > 0:
                    self.pool(HOST, side.table).release(tail[:num_passed])
                    tails[side.table] = tail[num_passed:]
                    tables.set_first(side.table, row, end)
                    self._sides.count_passed(side, num_passed)

    def tail_is_node(self, row: int, column: int) -> bool:
        place = column - int(self._tables.num_blocks[row])
        tail = self.tails[row][0]
        return 0 <= place < len(tail) and bool(self._index.pools[HOST].has_content(tail[place]))

    def _entries_on_device(self, row: int, keep: int) -> list[list[Entry]]:
        """By table, the row's device blocks from column `keep` on that hold launched tokens, each with its node."""
        tables, path = self._tables, self._index.paths[row]
        nodes = [(run, at) for run, first, stop in path.spans(keep) for at in range(first, stop)]
        nodes += self._index.nodes_of_forks(row)[max(0, keep - path.published) :]
        stop = min(-(-tables.num_launched.item(row) // tables.block_size), tables.num_blocks.item(row))
        blocks = tables.blocks[0, row, keep:stop].tolist()
        found: list[list[Entry]] = [[(block, nodes[i] if i < len(nodes) else None) for i, block in enumerate(blocks)]]
        for side in self._layout.sides:
            first, last = max(keep, tables.first.item(side.table, row)), min(stop, 1) if side.is_state else stop
            found.append([(block, None) for block in tables.blocks[side.table, row, first:last].tolist()])
        return found

    def _entries_on_host(self, tails: list[Blocks]) -> list[list[Entry]]:
        nodes = self._index.node_of_each(HOST, tails[0])
        found: list[list[Entry]] = [list(zip(tails[0].tolist(), nodes, strict=True))]
        return found + [[(block, None) for block in tail.tolist()] for tail in tails[1:]]

    def _pages_wanted(self, place: int, of_rows: list[list[list[Entry]]]) -> int:
        """Available pages of a place that `_moved_to` would take for these entries, listed by row and table. To hold a
        cached block takes it from the available ones, as a draw does."""
        total, index = 0, self._index
        for table, (pages, is_shared) in enumerate(self._kinds):
            entries = [entry for tables in of_rows for entry in tables[table]]
            there = [-1 if node is None else index.block(place, *node) for _, node in entries]
            is_held = [block >= 0 and index.pools[place].refs(block) > 0 for block in there]
            wanted = {node or source for (source, node), held in zip(entries, is_held, strict=True) if not held}
            total += pages * (len(wanted) if is_shared else len(entries))
        return total

    def _moved_to(
        self, place: int, of_tables: list[list[Entry]], copied: dict[int, dict[int, int]], pairs: list[tuple[int, int]]
    ) -> list[Blocks]:
        """Hold or draw a block of a place for each entry of a row, by table. Returns them, int64 [n] each. Adds copies
        to `pairs`, page by page, and those of blocks without a node to `copied` (by table, source → target), too."""
        found: list[Blocks] = []
        for table, ((pages, is_shared), entries) in enumerate(zip(self._kinds, of_tables, strict=True)):
            pool, blocks, new = self.pool(place, table), list[int](), list[tuple[int, int]]()
            # Forked rows' common partial block is copied once.
            moved = copied[table] if is_shared else {}
            for source, node in entries:
                block = moved.get(source, -1) if node is None else self._index.block(place, *node)
                if block >= 0:
                    pool.hold(np.array([block]))
                else:
                    if node is None:
                        block = moved[source] = pool.draw(1, pages or 1).item()
                    else:
                        block = self._index.draw_for(place, *node, node[1] + 1, pages or 1).item()
                    new.append((source, block))
                blocks.append(block)
            if new:
                sources, targets = np.array(new).T
                at = NUM_PLACES * table
                both = (at + 1 - place, sources), (at + place, targets)
                pairs += self._growth.copies.pairs(*both, pages).tolist()
            found.append(np.array(blocks, np.int64))
        return found
