"""The unchecked calls that a scheduler makes on memory in every step, and the state that they change.

A wrong row or count corrupts the tables, which only `check` finds. The calls of BlockManager check arguments first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising_from

from .check import violations_of
from .flights import LEFT, Flight, Flights
from .growth import NO_CHANGES, Growth, TableChanges
from .layout import Layout
from .moves import Moves, Pairs
from .pool import Pool
from .prefix_index import PrefixIndex
from .runs import DEVICE, HOST, NUM_PLACES, Blocks
from .sharing import Content, Sharing
from .side_content import SideContent
from .tables import Rows, Tables
from .tiers import IsWorthLoading, Offload, Tiers
from .views import GroupStats, GroupTables, RowView


class Composed(NamedTuple):
    """One batch as it was put out.

    number        the number of the batch
    flight        its shares
    is_empty      nothing was put out: changes of tables wait for the next batch
    moves         copies of content between the tiers
    slots         int64: the slots of each decode's next positions, packed
    last_tokens   int32 [n]: the last token that each decode knows
    changes       entries of block tables that changed since the last batch
    """

    number: int
    flight: Flight
    is_empty: bool
    moves: Moves
    slots: NDArray[np.int64]
    last_tokens: NDArray[np.int32]
    changes: TableChanges


class Memory:
    """The state of the memory layer, and the unchecked calls on it. The arrays that it shows are read-only views of
    live columns, valid until a row is added or gets more tokens, unless their docstring says that they are copies."""

    def __init__(
        self, layout: Layout, num_blocks: int, host_blocks: int, host_caching: bool, row_ends: bool, takes_ahead: bool
    ) -> None:
        self.layout, self.block_size, self.prefix_caching = layout, layout.block_size, layout.keeps
        self.num_blocks, self.num_host_blocks, self.host_caching = num_blocks, host_blocks, host_caching
        # Blocks that requests can have: see `spare`.
        self.capacity = num_blocks
        self.tables = Tables(self.block_size, num_columns=min(64, self.num_blocks), num_tables=1 + len(layout.sides))
        self.device = Pool(self.num_blocks, "device", layout.most_pages)
        # The full group's blocks. Without a full group they number positions, and cost nothing.
        self.blocks = (
            self.device if layout.full_pages else Pool(layout.num_main_blocks(num_blocks), "position", grows=True)
        )
        self.host = Pool(self.num_host_blocks, "host", layout.most_pages)
        self.flights = Flights()
        # Without prefix caching no row reads or writes, and the index stays empty.
        of_host = self.host if layout.full_pages else Pool(1, "position", grows=True)
        places = self.blocks, of_host, *(self.device, self.host) * len(layout.sides)
        self.index = PrefixIndex(self.tables, self.flights, *places, host_gives_way=host_caching)
        self.growth = Growth(self.tables, places, layout)
        self.offload = Offload(self.index, self.growth) if host_caching else None
        self.sides = SideContent(self.index, self.growth, row_ends)
        # Whether rows hold full blocks behind a hit that a side ended: see `Sharing.take_ahead`.
        self._takes_ahead = takes_ahead and layout.keeps and bool(layout.sides and layout.full_pages)
        self.tiers = Tiers(self.growth, self.index, self.offload, self.sides)
        self.rows = RowView(self.tables, self.tiers)
        self.sharing = Sharing(self.flights, self.index, self.growth, self.tiers, self.sides)
        self.content = Content(self.index, self.growth, self.offload, self.sides)
        self.batch = 1
        # Whether any row may hold blocks beyond its tokens.
        self._any_reserved = False

    def spare(self, num_blocks: int) -> None:
        """Count so many blocks as taken, because content is pinned in them."""
        self.capacity = self.num_blocks - num_blocks

    def add_counted(
        self,
        tokens: NDArray[np.int32],
        root: bytes,
        *,
        count: bool = True,
        reads: bool = True,
        writes: bool = True,
        keep_at: Sequence[int] = (),
        level: int = 0,
    ) -> int:
        """`BlockManager.add` for a token array and an encoded namespace (`root_prefix`). Without `count` the hit
        figures leave out the lookup: a sequence that returns was counted before. `level`: see `Path.open_level`."""
        caches = self.prefix_caching
        row = self._open(tokens, keep_at)
        path = self.index.open_path(row, root, reads=reads and caches, writes=writes and caches, level=level)
        if not path.reads:
            return row
        try:
            found = self.sharing.extend_hit(row, count=count)
        except MemoryError:
            self.release(row)
            raise
        if count:
            self.sharing.count_lookup(len(tokens), found)
        return row

    def _open(self, tokens: NDArray[np.int32], keep_at: Sequence[int]) -> int:
        row = self.tables.open(tokens)
        if self.layout.sides:
            self.sides.begin(row, len(tokens), keep_at)
        return row

    def admit(
        self, tokens: NDArray[np.int32], root: bytes, most: int, *, keep_at: Sequence[int] = (), level: int = 0
    ) -> tuple[int, int, int]:
        """`add_counted`, and `place_one` of at most `most` tokens; blocks must be available. Before other calls, or a
        look at tables, call `draw_promised`. Returns (row, tokens found, tokens placed)."""
        index, size, num_tokens, computed = self.index, self.block_size, len(tokens), 0
        key = self.content.first_key(tokens, root)
        if self.prefix_caching and key not in index.runs and num_tokens >= size and most >= size:
            # Most new prompts begin a run, which needs no lookup: `benchmarks/compare.py --only churn`.
            row = self._open(tokens, keep_at)
            index.open_path(row, root, key=key, level=level)
            self.sharing.count_lookup(num_tokens, 0)
        else:
            if key in index.runs:
                self.growth.evict_promised()
            row = self.add_counted(tokens, root, keep_at=keep_at, level=level)
            computed = self.tables.num_computed.item(row)
        end = min(computed + most, num_tokens)
        if not self.layout.is_plain:
            # A window gives back what a long chunk passes only when the chunk is computed.
            end = self.next_end(row, computed, min(end, self.tokens_within(row, self.growth.num_unpromised)))
        self._launch_one(row, computed, end)
        return row, computed, end - computed

    def next_end(self, row: int, start: int, end: int) -> int:
        """Where a share of the row from token `start` on should end: at most at `end`."""
        return self.sides.next_end(row, start, end) if self.layout.states else end

    def _move_states(self, rows: Rows) -> None:
        if self.layout.states and len(rows := rows[self.growth.moving_states(rows)]):
            self.growth.draw_promised()
            self.sides.move_states(rows, self.tables.num_launched[rows], self.flights.composed)

    def keep_states(self) -> None:
        """Let rows of the composed batch keep the states that they begin with: see `SideContent.keep_states`."""
        if self.layout.states:
            self.sides.keep_states(self.flights.composed)

    def extend(self, rows: Rows, tokens: NDArray[np.int32], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append a token, int32 [n], to each of these distinct rows, which know `ends` tokens. Returns `ends` + 1."""
        tables, totals = self.tables, ends + 1
        try:
            tables.tokens[rows, ends] = tokens
        except IndexError:
            # Cheaper than a check of all rows each time: numpy checks all indices before it writes.
            tables.ensure_tokens(int(totals.max()))
            return self.extend(rows, tokens, ends)
        tables.num_tokens[rows] = totals
        tables.last_token[rows] = tokens
        return totals

    def extend_by(self, rows: Rows, tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append `counts[i]` of the packed tokens to `rows[i]`, all distinct. Returns the rows' new ends, int64 [n]."""
        tables = self.tables
        known = tables.num_tokens[rows]
        totals = known + counts
        if not len(tokens):
            return totals
        tables.ensure_tokens(int(totals.max()))
        # One index for both dimensions costs half of two.
        tables.tokens.reshape(-1)[rising_from(rows * tables.tokens.shape[1] + known, counts)] = tokens
        tables.num_tokens[rows] = totals
        tables.last_token[rows] = tables.tokens[rows, totals - 1]
        return totals

    def place(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64], *, one_each: bool = False) -> None:
        """Put tokens `starts[i]` to `ends[i]` - 1 of distinct rows in flight, all launched to `starts` (`one_each`: one
        a row). Promise blocks, as `admit`. Plan copies of partial blocks. Raises OutOfBlocks, changing nothing."""
        tables, growth = self.tables, self.growth
        have = tables.num_blocks[rows]
        short = (ends > have * self.block_size).nonzero()[0]
        wanted = None if one_each else -(-ends[short] // self.block_size)
        if growth.any_shared_tail:
            growth.copy_shared_tails(rows, int(growth.lacking(rows, ends).sum()))
        if self.layout.states and tables.moves_state[rows].any():
            self.device.require(growth.num_promised + int(growth.lacking(rows, ends).sum()))
        if len(short):
            growth.promise(rows[short], have[short], wanted)
        if self._takes_ahead and not one_each:
            self.sharing.take_ahead(rows, starts, ends)
        self._move_states(rows)
        tables.num_launched[rows] = ends
        self.flights.composed.place(rows, starts, ends)
        if self.index.num_looking_up:
            places = tables.looks_up[rows].nonzero()[0].tolist()
            if len(places) > 1:
                # Rows with computed blocks publish them first, before another row begins to compute the same.
                places.sort(key=lambda place: not self.index.is_behind(rows.item(place)))
            for place in places:
                self._begin_pending(rows.item(place))

    def place_one(self, row: int, count: int) -> None:
        """`place` of one row, whose blocks are drawn at once."""
        tables = self.tables
        start, have = tables.num_launched.item(row), tables.num_blocks.item(row)
        if self.growth.any_shared_tail:
            self.place(np.array([row]), np.array([start]), np.array([start + count]))
            self.growth.draw_promised()
            return
        wanted = -(-(start + count) // self.block_size)
        tables.ensure_columns(wanted)
        self._launch_one(row, start, start + count)
        if wanted > have:
            self.growth.draw_promised()

    def begin_batch(self, number: int) -> None:
        self.batch = self.index.batch = number
        self.device.begin_step(number)
        self.host.begin_step(number)
        self.flights.begin(number)

    def _launch_one(self, row: int, start: int, end: int) -> None:
        """Put tokens `start` to `end` - 1 of a row in flight, and promise it the blocks that it lacks."""
        have, wanted = self.tables.num_blocks.item(row), -(-end // self.block_size)
        if wanted > have:
            self.growth.promise_one(row, have, wanted)
        if self._takes_ahead:
            self.sharing.take_ahead(np.array([row]), np.array([start]), np.array([end]))
        if self.layout.states:
            self._move_states(np.array([row]))
        self.tables.num_launched[row] = end
        self.flights.composed.place_one(row, start, end)
        if self.tables.looks_up[row]:
            self._begin_pending(row)

    def _begin_pending(self, row: int) -> None:
        if self.index.fills_next(row):
            # First: content that this evicts is not found below, so this row computes it, for others, too.
            self.growth.evict_promised()
            self.index.begin_pending(row)

    def draws_states(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of the batch's decodes, bool [n], have to write their states elsewhere once they have drafts."""
        has_any = self.tables.num_launched[rows] > 1
        return has_any & ~np.isin(rows, list(self.flights.composed.reads))

    def lengthen(self, rows: Rows, ends: NDArray[np.int64], have: NDArray[np.int64], needs: NDArray[np.int64]) -> None:
        """Extend the shares of these rows, the batch's decodes, by drafts up to `ends`, int64 [n]. Promise each row
        `needs` blocks beyond the `have` that it holds or is promised."""
        launched, short = self.tables.num_launched[rows], needs.nonzero()[0]
        if len(short):
            self.growth.promise(rows[short], have[short], have[short] + needs[short])
        if self.layout.states:
            self.growth.draw_promised()
            moves = (ends > launched) & self.draws_states(rows)
            self.sides.move_states(rows[moves], launched[moves] - 1, self.flights.composed)
        self.tables.num_launched[rows] = ends
        self.flights.composed.lengthen(rows, ends)

    def reject(self, flight: Flight, rows: Rows, ends: NDArray[np.int64]) -> None:
        """Drop what the batch computed of these rows beyond `ends`, int64 [n]: drafts were wrong. Release blocks that
        hold nothing else. A row with states has to end where its share began; it gets back the states that it read."""
        tables = self.tables
        is_alone = tables.is_swapped[rows]
        if self.layout.states:
            is_wrong = ends < tables.num_launched[rows]
            stand = self.sides.take_back(flight, rows[is_wrong])
            # The others had no state to read: their share began at token 0.
            is_alone = is_alone | (is_wrong & ~np.isin(rows, stand))
        if is_alone.any():
            for row, end in zip(rows[is_alone].tolist(), ends[is_alone].tolist(), strict=True):
                if end < tables.num_launched[row]:
                    self._fall_back(row, end)
            rows, ends = rows[~is_alone], ends[~is_alone]
        launched = np.minimum(tables.num_launched[rows], ends)
        tables.num_launched[rows] = launched
        places = (launched <= (tables.num_blocks[rows] - 1) * self.block_size).nonzero()[0]
        if not len(places):
            return
        rows, launched = rows[places], launched[places]
        keep = np.maximum(-(-launched // self.block_size), tables.reserved[rows])
        while (is_longer := tables.num_blocks[rows] > keep).any():
            rows, keep = rows[is_longer], keep[is_longer]
            columns = tables.num_blocks[rows] - 1
            for side in self.layout.bounded:
                self.device.release(tables.blocks[side.table, rows, columns][::-1])
            self.blocks.release(tables.blocks[0, rows, columns][::-1])
            tables.set_num_blocks(rows, columns)

    def commit(
        self, decodes: Rows, positions: NDArray[np.int64], counts: NDArray[np.int64] | None, now: float, has_more: bool
    ) -> Composed:
        """Put out the batch of logical time `now`: draw what was promised, and return what an engine needs of memory.
        The rows `decodes`, int64 [n], were placed first; `positions` are what they compute, packed, `counts[i]` of row
        i (None: one each). With `has_more` a batch without rows is put out, too."""
        self.growth.draw_promised()
        self.content.retentions.expire(now)
        flight, changes = self.flights.composed, NO_CHANGES
        if flight.is_used:
            # Before the copies are taken: content that this evicts is copied before the batch writes there.
            self.keep_states()
        number, moves = self.batch, self.growth.copies.take()
        is_empty = not (flight.is_used or has_more or len(moves))
        if not is_empty:
            # No engine runs an empty batch: changes wait for the next one.
            changes = self.growth.take_changes()
            self.flights.seal()
        self.begin_batch(number + 1)
        self.growth.copies.allow_content(False)
        slots, last_tokens = self.slots(decodes, positions, counts), self.tables.last_token[decodes]
        return Composed(number, flight, is_empty, moves, slots, last_tokens, changes)

    def group_tables(self, flight: Flight) -> tuple[GroupTables, ...]:
        """The tables of a batch's rows, one for each layer group."""
        groups = range(len(self.layout.groups))
        return tuple([GroupTables(self.growth, group, flight.rows, flight) for group in groups])

    def pages_of_rows(self, rows: list[int]) -> int:
        """Pages that these rows hold, each counted once."""
        return sum(self.pages_by_group(rows))

    def blocks_of(self, row: int) -> list[tuple[int, Blocks]]:
        """The row's device blocks, int64 [n], by place: those of the full group, then of each side."""
        tables, stop = self.tables, self.tables.num_blocks.item(row)
        found = [(DEVICE, tables.blocks[0, row, :stop].astype(np.int64))]
        for side in self.layout.sides:
            first, end = (0, min(stop, 1)) if side.is_state else (tables.first.item(side.table, row), stop)
            found.append((side.place, tables.blocks[side.table, row, first:end].astype(np.int64)))
        return found

    def _beside_tables(self) -> list[tuple[int, int]]:
        """(table, block) of device references that no row has: of copies to come, and of states that batches read."""
        reads = [read for flight in self.flights.all for read in flight.reads.values()]
        states = [side.table for side in self.layout.states]
        held = [(at // NUM_PLACES, blocks) for at, blocks in self.growth.copies.held if at % NUM_PLACES == DEVICE]
        beside = [(table, block) for table, blocks in held for block in blocks.tolist()]
        return beside + [pair for read in reads for pair in zip(states, read.blocks, strict=True)]

    def pages_by_group(self, rows: Sequence[int]) -> list[int]:
        """Pages that these rows hold in each group, each counted once."""
        array, numbers = np.array(rows, np.int64), range(len(self.layout.groups))
        return [self._held(number, array, ())[0] for number in numbers]

    def _held(self, number: int, rows: Rows, beside: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Pages that these rows, and `beside` them other references, hold in a group, each counted once; and slots in
        them with a computed token that the group has to keep (of states 0)."""
        tables, size = self.tables, self.block_size
        group, table = self.layout.groups[number], self.layout.table_of[number]
        firsts, stops = tables.first[table, rows], tables.num_blocks[rows]
        # The front of a row on the host may lie behind its device table.
        counts = np.minimum(stops, 1) if group.kind == "state" else np.maximum(stops - firsts, 0)
        rows, columns = rows.repeat(counts), rising_from(firsts, counts)
        computed, begins = tables.num_computed[rows], columns * size
        num_filled = np.minimum(computed, begins + size) - np.maximum(begins, group.front(computed))
        # By block, its slots with such tokens, of a shared one those of the row that computed most; -1: not held.
        filled = np.full(self.num_blocks, -1)
        filled[[block for at, block in beside if at == table]] = 0
        np.maximum.at(filled, tables.blocks[table, rows, columns], np.maximum(num_filled, 0))
        is_held = filled >= 0
        return int(np.count_nonzero(is_held)) * group.pages, int(filled[is_held].sum())

    def fragmentation(self) -> float:
        """Share of slots, held by rows and copies, without a computed token; 0 unless all layers are plain."""
        if not self.layout.is_plain:
            return 0.0
        num_blocks, num_filled = self._held(0, self.tables.live_rows, self._beside_tables())
        num_slots = num_blocks * self.block_size
        return (num_slots - num_filled) / num_slots if num_slots else 0.0

    def group_stats(self) -> tuple[GroupStats, ...]:
        """Figures of each group, if layers are of several kinds; else ()."""
        if not self.layout.sides:
            return ()
        lost, passed = [0, *self.sides.lost], self.sides.passed
        cached, on_host = (self.sides.cached_pages(tier) for tier in (DEVICE, HOST))
        beside, found = self._beside_tables(), list[GroupStats]()
        for number, (group, at) in enumerate(zip(self.layout.groups, self.layout.table_of, strict=True)):
            used, num_filled = self._held(number, self.tables.live_rows, beside)
            kept = used if group.kind == "state" else num_filled * group.pages / self.block_size
            found.append(GroupStats(group, used, cached[at], passed[at], lost[at], used - kept, on_host[at]))
        return tuple(found)

    def pages_freed(self, row: int) -> NDArray[np.int64]:
        """Pages that become free with each of the row's blocks, int64 [n]; none with a shared one."""
        pages: NDArray[np.int64] = (self.blocks.refs(self.rows.table(row)) == 1) * np.int64(self.layout.full_pages)
        for side in self.layout.bounded:
            pages[self.tables.first[side.table, row] :] += side.pages
        return pages

    def tokens_within(self, row: int, num_pages: int) -> int:
        """Tokens that the row's blocks would hold with `num_pages` more pages."""
        have, layout = self.tables.num_blocks.item(row), self.layout
        if layout.is_plain:
            return (have + num_pages) * self.block_size
        moves = bool(layout.states) and self.growth.moving_states(np.array([row])).any()
        room = num_pages - (layout.state_pages if not have or moves else 0)
        if moves and room < 0:
            return self.tables.num_launched.item(row)
        more = room // layout.block_pages if layout.block_pages and room > 0 else 0
        if not layout.block_pages and room >= 0:
            more = self.blocks.num_available
        return (have + more) * self.block_size

    def is_placed(self, row: int) -> bool:
        return self.flights.composed.has(row)

    def fork_of(self, row: int) -> int:
        tables = self.tables
        launched = tables.content_end(row)
        num_blocks = -(-launched // self.block_size)
        child = tables.open(tables.tokens[row, : tables.num_tokens[row]])
        tables.want(child, tables.wanted[:, row].tolist())
        self.index.fork_path(row, child)
        if num_blocks:
            blocks = tables.blocks[0, row, :num_blocks].astype(np.int64)
            self.blocks.hold(blocks)
            self.growth.write(child, 0, blocks)
            self.growth.share_sides(row, child, num_blocks)
        tables.set_progress(child, launched, min(launched, int(tables.num_computed[row])))
        self.flights.inherit(row, child, launched)
        if launched % self.block_size:
            self.growth.mark_tail(row, True)
            self.growth.mark_tail(child, True)
        self.sharing.share_fork(row, child)
        return child

    def fork_to_write(self, row: int) -> tuple[int, Pairs]:
        """Fork a row that no batch computes, and copy its partial block at once. Returns the fork, and (source, target)
        of each page. Raises OutOfBlocks, changing nothing."""
        tables, growth = self.tables, self.growth
        if tables.num_launched[row] % self.block_size:
            self.device.require(self.layout.block_pages)
        shared_it_before = tables.shares_tail.item(row)
        child = self.fork_of(row)
        growth.copy_shared_tails(np.array([child]), 0)
        # The child has a copy, so the row shares no more than before.
        growth.mark_tail(row, shared_it_before)
        return child, growth.copies.take_within()

    def give_up_from(self, row: int, num_tokens: int) -> None:
        """Void what batches compute of the row from the unknown token `num_tokens` on; it is launched no further."""
        self.flights.clip(row, num_tokens)
        self._fall_back(row, num_tokens)

    def slots(self, rows: Rows, positions: NDArray[np.int64], counts: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Slots of `counts[i]` rising positions of `rows[i]` (None: one each), packed, int64 [n]."""
        tables, size = self.tables, self.block_size
        rows = rows if counts is None else rows.repeat(counts)
        slots: NDArray[np.int64] = tables.slot_base[rows]
        slots += positions
        if counts is None and not self._any_reserved:
            return slots
        # `slot_base` is right in a row's last block, where most positions are.
        is_other = positions < (tables.num_blocks[rows] - 1) * size
        if is_other.any():
            at = positions[is_other]
            columns = at // size
            slots[is_other] = (tables.blocks[0, rows[is_other], columns] - columns) * np.int64(size) + at
        return slots

    def settle(self, flight: Flight) -> None:
        """End the oldest batch, which ran: confirm its tokens, make nodes of full blocks, release duplicates."""
        tables, index = self.tables, self.index
        self.flights.outstanding.remove(flight)
        rows, _, ends = flight.columns()
        if flight.has_drafts or flight.held is not None or flight.is_fork is not None:
            # A rejected draft is not launched any more, and a token without a value is not computed.
            ends = np.minimum(ends, np.minimum(tables.num_launched[rows], tables.num_tokens[rows]))
            np.maximum.at(tables.num_computed, rows, ends)
        else:
            tables.num_computed[rows] = ends
        index.confirm(flight.number)
        if flight.reads:
            self.sides.settle(flight)
        if index.num_looking_up:
            for place in tables.looks_up[flight.rows].nonzero()[0].tolist():
                if flight.holds(place):
                    self.sharing.publish(flight.rows.item(place))
        if self.layout.bounded:
            # Last: blocks that windows pass may carry nodes now.
            self.sides.give_back_fronts(rows)
            if self.tiers.tails:
                self.tiers.give_back_fronts(rows)
        self.sharing.forget_sharers(flight.number)

    def take_back(self, flight: Flight) -> dict[int, int]:
        """End the latest batch, which did not run: rows fall back to where their shares began, pending nodes are
        withdrawn, and rows that shared these are truncated. Returns the counted hit tokens that each such row lost."""
        lost_hits = self.sharing.cut_sharers(flight)
        shares = flight.shares()[::-1]
        stand = self.sides.take_back(flight, np.array(list(flight.reads), np.int64))
        for share in shares:
            self._fall_back(share.row, share.start, stands=share.row in stand)
        for share in shares:
            # After all releases: only now it is known which tails are shared.
            self.growth.note_shared_tail(share.row)
        self.flights.outstanding.remove(flight)
        self.index.withdraw(flight.number)
        self.sharing.hand_down(flight.number)
        return lost_hits

    def _fall_back(self, row: int, stays: int, *, stands: bool = False) -> None:
        """Lower the row's watermarks to `stays` tokens at most. Release the blocks behind them, but not reserved ones.
        `stands`: the caller knows that the row can stand there."""
        tables, size = self.tables, self.block_size
        breaks = not stands and not self.growth.is_restart(row, stays)
        if tables.is_swapped[row] and stays % size and self.tiers.tail_is_node(row, stays // size):
            # A partial block on the host must not lie in a node's block.
            stays -= stays % size
            self.flights.clip(row, stays)
        tables.fall_back(row, stays)
        self.index.fall_back(row)
        keep = -(-tables.num_launched.item(row) // size)
        if tables.is_swapped[row]:
            self.tiers.trim(row, keep)
        self.growth.give_back(row, max(keep, int(tables.reserved[row])))
        if breaks:
            # The state of that length is overwritten: the row begins again.
            self.sharing.truncate(row, 0)

    def release(self, row: int) -> None:
        """End a row, in flight or not: keep its content, void its shares, release its blocks tail first."""
        tables = self.tables
        spans = self.sides.end(row) if self.layout.sides else []
        first, blocks, num_nodes, run = self.index.release_path(row)
        if self.flights.outstanding or self.flights.composed.is_used:
            self.flights.clip(row, LEFT)
            # Another sequence may get the row within this batch.
            self.flights.composed.written_from.pop(row, None)
            read = self.flights.composed.reads.pop(row, None)
            for block in read.blocks if read is not None else ():
                self.device.release(np.array([block]))
        if tables.is_swapped.item(row):
            self.tiers.trim(row, 0)
        if self.layout.sides:
            self.growth.give_back_sides(row, 0)
        # Apart, and tail first: to release blocks in one state is one read and one write.
        if len(blocks):
            self.blocks.release(blocks, run, num_nodes)
        if first:
            self.blocks.release(tables.blocks[0, row, : min(first, tables.num_blocks.item(row))])
        if spans:
            self.sides.renew(spans)
        tables.close(row)

    def reserve_rows(self, rows: Rows, num_blocks: NDArray[np.int64]) -> None:
        """`BlockManager.reserve`. Raises OutOfBlocks, changing nothing."""
        have = self.tables.num_blocks[rows]
        short = (num_blocks > have).nonzero()[0]
        if len(short):
            self.growth.promise(rows[short], have[short], num_blocks[short])
            self.growth.draw_promised()
        self.tables.reserved[rows] = np.maximum(self.tables.reserved[rows], num_blocks)
        self._any_reserved = True

    def shrink(self, row: int, reserved: int) -> None:
        """Lower the row's reservation to `reserved` blocks. Release those behind it that hold no launched token."""
        self.tables.reserved[row] = reserved
        self.growth.give_back(row, max(-(-int(self.tables.num_launched[row]) // self.block_size), reserved))

    def load_where(self, is_worth_loading: IsWorthLoading) -> None:
        if self.offload is not None:
            self.offload.load_where(is_worth_loading)

    def set_computed(self, row: int, num_computed: int) -> None:
        """Confirm the row's first `num_computed` tokens, which were written elsewhere. Full blocks become nodes."""
        self.tables.set_progress(row, num_computed, num_computed)
        self.sharing.publish(row)
        self.sides.give_back_fronts(np.array([row]))

    def check(self) -> list[str]:
        return violations_of(self.growth, self.flights, self.index, self.tiers, self._beside_tables())
