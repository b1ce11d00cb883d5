"""Ends of rows within a block, where models keep states: the next turn of a conversation computes nothing twice.

    tokens   0        16       32    37           a row ends after 37 tokens
    full     | n0     | n1     : e  |             its partial block of each group, and its state,
    state                           ◆             are content: the end of node n1, for the tokens 32 to 36

A node has one end, and a newer one replaces it. A row that begins there copies the partial blocks and reads the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .growth import Growth
from .layout import Layout
from .pool import Pool
from .prefix_index import Match, PrefixIndex
from .runs import DEVICE, Path, Run, first_of
from .side_content import SideContent, place_of
from .tables import Tables


class RowEnds:
    def __init__(
        self, tables: Tables, index: PrefixIndex, device: Pool, growth: Growth, content: SideContent, layout: Layout
    ) -> None:
        self._tables, self._index, self._device, self._growth = tables, index, device, growth
        self._content, self._layout, self._size = content, layout, tables.block_size

    def keep(self, row: int) -> None:
        """Keep where the row, which is about to end, stands within a block."""
        tables = self._tables
        computed = tables.num_computed.item(row)
        column, rest = divmod(computed, self._size)
        path = self._index.paths[row].closed(self._index.confirmed_length)
        stands = rest and computed == tables.num_launched.item(row) and path.published == column > 0
        # Not on the host.
        stands = stands and column < tables.num_blocks[row]
        if not stands or not path.writes:
            return
        blocks = {DEVICE: tables.blocks.item(0, row, column)}
        for side in self._layout.sides:
            blocks[place_of(side)] = tables.blocks.item(side.table, row, 0 if side.is_state else column)
        pools = self._index.pools
        if not any(pools[place].has_content(block) for place, block in blocks.items()):
            self._index.add_end(path, tables.tokens[row, column * self._size : computed].tobytes(), blocks)

    def find(
        self, path: Path, tokens: NDArray[np.int32], have: int, match: Match, hit: Match, row: int = -1
    ) -> tuple[Match, Run | None]:
        """The longest end of these tokens, of which one is left to compute, behind the nodes of a match, which begins at
        column `have`; and the match before it. The `hit`, and None, where no end goes further than that."""
        if not self._index.ends:
            return hit, None
        most = match.num_blocks if match.first_pending < 0 else min(match.num_blocks, match.first_pending - have)
        for num_blocks, end in self._below(path, match, most):
            start = (have + num_blocks) * self._size
            length = start + len(end.tokens) // 4
            is_theirs = length < len(tokens) and tokens[start:length].tobytes() == end.tokens
            if num_blocks < hit.num_blocks or not is_theirs or not self._has_room(num_blocks):
                continue
            found = Match(first_of(match.spans, num_blocks), num_blocks, -1)
            is_whole = all(end.block(place_of(side), 0) >= 0 for side in self._layout.sides)
            if is_whole and self._content.windows_stand(found, have, row):
                return found, end
        return hit, None

    def _has_room(self, num_blocks: int) -> bool:
        """Whether the partial blocks can be copied, and another state written, when all that a row takes before is held."""
        layout, room = self._layout, self._device.num_available - self._growth.num_promised
        return room >= layout.pages_for((num_blocks + 1) * self._size) + layout.block_pages + layout.state_pages

    def _below(self, path: Path, match: Match, most: int) -> Iterator[tuple[int, Run]]:
        """The ends of the first `most` nodes of a match, and of the node before, with the number of nodes: longest first."""
        stop = most
        for run, first, last in reversed(first_of(match.spans, most)):
            for at in sorted(run.children, reverse=True):
                end = self._index.end_of(run, at) if first <= at < last else None
                if end is not None:
                    yield stop - last + at + 1, end
            stop -= last - first
        if (end := self._index.ends.get(path.prefix)) is not None:
            yield 0, end

    def take(self, row: int, have: int, end: Run) -> int:
        """Let the row, which had `have` blocks and has those before it, go on from an end. Returns the tokens won."""
        tables, growth = self._tables, self._growth
        column = tables.num_blocks.item(row)
        tables.ensure_columns(column + 1)
        parts = [(0, DEVICE, self._layout.full_pages)]
        parts += [(side.table, place_of(side), side.pages) for side in self._layout.bounded]
        for table, place, _ in parts:
            # First: what is drawn next must not evict it.
            growth.hold_source(table, end.block(place, 0))
        for side in self._layout.states:
            self._device.hold(end.blocks_in(place_of(side), 0, 1))
            if have:
                self._device.release(tables.blocks[side.table, row, :1])
            tables.put(side.table, row, 0, end.block(place_of(side), 0))
        for table, place, pages in parts:
            growth.copy_here(table, row, column, end.block(place, 0), pages)
        tables.let_move(row, True)
        won = len(end.tokens) // 4
        length = column * self._size + won
        tables.set_progress(row, length, length)
        return won
