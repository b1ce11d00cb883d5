"""Content of windows, chunks and states: which of it is kept, and at which lengths a prompt can begin with it.

    full      | n0 | n1 | n2 | n3 | n4 |      found: all five nodes
    window    | -  | -  | n2 | n3 | -  |      reaches back from the ends of n3
    state     | -  | -  | -  | ◆  | -  |      kept at the end of n3
    a hit ends where every group can stand: after n3

A node resides in each group by itself, in the place of that group. What a row holds when it ends is kept; what it passes
is kept if a prompt is likely to begin there (the last full block of its own prompt, and where it parted from others), and
as long as pages are free, to be evicted first.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .flights import Flight, StateRead
from .layout import Layout, Side
from .pool import Pool
from .prefix_index import Match, PrefixIndex
from .runs import Blocks, Span, first_of, num_nodes
from .tables import Rows, Tables

# The places of the device and the host come before those of the sides, whose tables are numbered from 1 on.
_FIRST_PLACE = 1


def _place(side: Side) -> int:
    return _FIRST_PLACE + side.table


class SideContent:
    def __init__(self, tables: Tables, index: PrefixIndex, device: Pool, layout: Layout) -> None:
        self._tables, self._index, self._device, self._layout = tables, index, device, layout
        self._size = tables.block_size

    def begin(self, row: int, num_tokens: int) -> None:
        """Note how far the prompt of a new row goes: its last full block, one token being left to compute, is wanted; its end,
        if that is a block's, too, while pages are free."""
        last, end = (num_tokens - 1) // self._size, num_tokens // self._size
        self._tables.want(row, last, 0, end if num_tokens % self._size == 0 else 0)

    def restart(self, match: Match, have: int, row: int = -1) -> Match:
        """The longest part of a match, which begins at column `have`, after which every group can stand. `row`: whose
        first `have` blocks are there already. Confirmed nodes alone."""
        most = match.num_blocks if match.first_pending < 0 else min(match.num_blocks, match.first_pending - have)
        if most <= 0:
            return Match([], 0, -1)
        ends = np.arange(have + 1, have + most + 1)
        stands = np.ones(most, np.bool_)
        for side in self._layout.sides:
            is_there = self._residence(side, match.spans)[:most] >= 0
            if side.is_state:
                stands &= is_there
                continue
            begins = side.first_column(ends * self._size)
            # Holes before each column; none may lie between where a window begins and its end.
            holes = np.concatenate([[0], np.cumsum(~is_there)])
            stands &= holes[1:] == holes[np.maximum(begins - have, 0)]
            if have:
                stands &= (begins >= have) | (begins >= self._tables.first[side.table, row])
        if not stands.any():
            return Match([], 0, -1)
        num = most - int(stands[::-1].argmax())
        return Match(first_of(match.spans, num), num, -1)

    def _residence(self, side: Side, spans: list[Span]) -> Blocks:
        """The block of each node of the spans in a side's place, int64 [n]; -1: none."""
        found = np.empty(num_nodes(spans), np.int64)
        at = 0
        for run, first, stop in spans:
            part = found[at : at + stop - first]
            part[:] = run.blocks_in(_place(side), first, stop)
            if run.row >= 0 and not side.is_state:
                # A row that goes on shares what its window still holds.
                start, held = self._index.paths[run.row].published, int(self._tables.first[side.table, run.row])
                begin = max(start + first, held)
                part[max(0, begin - start - first) :] = self._tables.blocks[side.table, run.row, begin : start + stop]
            at += stop - first
        return found

    def take(self, row: int, have: int, match: Match) -> None:
        """Give the row, which has `have` blocks, what every side holds of a `restart`; its table has the columns."""
        tables, stop = self._tables, have + match.num_blocks
        for side in self._layout.sides:
            blocks = self._residence(side, match.spans)
            if side.is_state:
                self._device.hold(blocks[-1:])
                if have:
                    self._device.release(tables.blocks[side.table, row, :1])
                tables.put(side.table, row, 0, blocks[-1])
                tables.let_move(row, True)
                continue
            begin, first = int(side.first_column(stop * self._size)), int(tables.first[side.table, row])
            blocks = blocks[max(begin - have, 0) :]
            self._device.hold(blocks)
            if first < min(begin, have):
                self._device.release(tables.blocks[side.table, row, first : min(begin, have)])
            tables.put(side.table, row, slice(stop - len(blocks), stop), blocks)
            tables.set_first(side.table, row, max(begin, first))

    def note_junction(self, row: int, num_blocks: int) -> None:
        """Want what the row passes after so many blocks: there other prompts part from its own, and no group stood."""
        last, _, end = self._tables.wanted[:, row].tolist()
        self._tables.want(row, last, num_blocks, end)

    def next_end(self, row: int, start: int, end: int) -> int:
        """Where a share from token `start` on ends, at most at `end`: at the first length at which its states are wanted."""
        wanted = self._tables.wanted[:, row] * self._size
        return int(min([length for length in wanted.tolist() if start < length < end], default=end))

    def keep_all(self, row: int) -> None:
        """Keep what the sides of a row that ends hold of confirmed nodes."""
        tables = self._tables
        if not self._index.paths[row].writes:
            return
        for side in self._layout.bounded:
            first = int(tables.first[side.table, row])
            self._keep(side, row, first, int(tables.num_blocks[row]))
        computed = int(tables.num_computed[row])
        if computed and computed % self._size == 0 and computed == tables.num_launched[row] and tables.num_blocks[row]:
            for side in self._layout.states:
                self._keep_state(side, row, computed, tables.blocks[side.table, row, :1].astype(np.int64))

    def pass_by(self, side: Side, row: int, first: int, stop: int) -> None:
        """Release the row's blocks in columns `first` to `stop` - 1, which its window has passed; keep what is wanted,
        and the rest as long as pages are free."""
        tables, columns, last = self._tables, np.arange(first, stop), int(self._tables.wanted[:2, row].max())
        is_wanted = np.zeros(len(columns), np.bool_)
        for end in tables.wanted[:2, row].tolist():
            is_wanted |= (columns >= side.first_column(end * self._size)) & (columns < end)
        blocks = tables.blocks[side.table, row, first:stop].astype(np.int64)
        was_content = self._device.has_content(blocks)
        bounds = [0, *((is_wanted[1:] != is_wanted[:-1]).nonzero()[0] + 1).tolist(), len(columns)]
        for begin, end in pairwise(bounds):
            kept = is_wanted[begin] or self._device.num_free > 0
            if kept and self._index.paths[row].writes:
                self._keep(side, row, first + begin, first + end)
            if is_wanted[begin]:
                self._device.release(blocks[begin:end])
                continue
            # What was content before was of use: it ages as all does.
            self._device.release(blocks[begin:end][was_content[begin:end]])
            self._device.release(blocks[begin:end][~was_content[begin:end]], is_next=True)
        if stop > side.first_column(last * self._size) and last * self._size <= tables.num_computed[row]:
            # All of the last wanted window at once: block by block it costs as much each time.
            self._keep(side, row, stop, last)
            tables.has_kept(side.table, row)

    def _keep(self, side: Side, row: int, first: int, stop: int) -> None:
        """Let the row's blocks in these columns carry the row's nodes that reside nowhere in this place."""
        index, place = self._index, _place(side)
        path = index.paths[row].closed(index.confirmed_length)
        stop = min(stop, path.published, int(self._tables.num_blocks[row]))
        if first >= stop:
            return
        column = first
        for run, begin, end in first_of(path.spans(first), stop - first):
            blocks = self._tables.blocks[side.table, row, column : column + end - begin].astype(np.int64)
            column += end - begin
            is_new = (run.blocks_in(place, begin, end) < 0) & ~self._device.has_content(blocks)
            if is_new.all():
                index.reside(place, run, begin, blocks)
            else:
                for at in is_new.nonzero()[0].tolist():
                    index.reside(place, run, begin + at, blocks[at : at + 1])

    def _keep_state(self, side: Side, row: int, num_tokens: int, block: Blocks) -> None:
        """Let a state at so many tokens of the row carry its node, unless another one does."""
        index, column = self._index, num_tokens // self._size - 1
        path = index.paths[row].closed(index.confirmed_length)
        if column >= path.published or self._device.has_content(block.item()):
            return
        run, at, _ = first_of(path.spans(column), 1)[0]
        if run.block(_place(side), at) < 0:
            index.reside(_place(side), run, at, block)

    # -- states that are read from one block and written to another

    def move_states(self, rows: Rows, flight: Flight) -> None:
        """Draw other blocks for the states of these rows, which are being placed in the batch and must not overwrite them."""
        for row in rows.tolist():
            self._move_state(row, self._tables.num_launched.item(row), flight)
            self._tables.let_move(row, False)

    def _move_state(self, row: int, start: int, flight: Flight) -> None:
        tables, old = self._tables, []
        for side in self._layout.states:
            old.append(tables.blocks.item(side.table, row, 0))
            tables.put(side.table, row, 0, self._device.draw(1, side.pages).item())
        flight.read_elsewhere(row, StateRead(tables.uid.item(row), start, tuple(old)))

    def keep_states(self, flight: Flight) -> None:
        """Let rows whose state stands where it is wanted write another one, if pages are available; at other ends of chunks
        as long as pages are free."""
        rows, starts, _ = flight.columns()
        tables, size, device, pages = self._tables, self._size, self._device, self._layout.state_pages
        # What the rows may draw in the next step is not taken.
        spared = pages + len(rows) * self._layout.block_pages
        at_ends = (starts % size == 0).nonzero()[0]
        rows, starts = rows[at_ends], starts[at_ends]
        may = (starts > 0) & (starts <= tables.wanted[:, rows].max(axis=0, initial=0) * size)
        for row, start in zip(rows[may].tolist(), starts[may].tolist(), strict=True):
            if row in flight.reads or not self._index.paths[row].writes:
                continue
            is_wanted = start // size in tables.wanted[:2, row]
            if device.num_free >= pages or (is_wanted and device.num_available >= spared):
                self._move_state(row, start, flight)

    def settle(self, flight: Flight) -> None:
        """Let go of the states that a batch, which ran, read and did not overwrite: they are kept, or free."""
        for row, (uid, start, blocks) in flight.reads.items():
            is_live = self._tables.uid[row] == uid
            is_wanted = is_live and start // self._size in self._tables.wanted[:2, row]
            for side, block in zip(self._layout.states, blocks, strict=True):
                is_new = not self._device.has_content(block)
                if is_live and is_new and start % self._size == 0 and self._tables.num_computed[row] >= start:
                    self._keep_state(side, row, start, np.array([block]))
                self._device.release(np.array([block]), is_next=is_new and not is_wanted)

    def take_back(self, flight: Flight) -> set[int]:
        """Give rows the states that the batch, which did not run, was to read. Returns the rows that stand where they
        stood before it."""
        stand: set[int] = set()
        for row, (uid, start, blocks) in flight.reads.items():
            # It has ended, or stands further in front, or is on the host: then what it held is given back already.
            if (
                self._tables.uid[row] != uid
                or self._tables.num_launched[row] <= start
                or not self._tables.num_blocks[row]
            ):
                for block in blocks:
                    self._device.release(np.array([block]))
                continue
            for side, block in zip(self._layout.states, blocks, strict=True):
                self._device.release(self._tables.blocks[side.table, row, :1])
                self._tables.put(side.table, row, 0, block)
            self._tables.let_move(row, True)
            stand.add(row)
        return stand

    def reads(self, flight: Flight, side: Side) -> dict[int, int]:
        """row -> the block that the batch reads its state from, where that is not the one that it writes."""
        place = self._layout.states.index(side)
        return {row: read.blocks[place] for row, read in flight.reads.items()}
