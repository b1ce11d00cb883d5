"""What callers see of memory: rows, blocks, the pages of a batch's rows, and figures.

Columns of rows are live views, valid until a row is added or gets more tokens. Arrays of blocks are copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paged.base.growing import rising

from .flights import Flight
from .growth import Growth
from .layout import LayerGroup
from .pool import Pool
from .tables import Rows, Tables
from .tiers import Tiers

_Integer = TypeVar("_Integer", bound=np.integer)

WINDOW = 1_000
"""The recent hit rate covers so many of the last lookups."""


class RowView:
    """The rows, as columns; entry i of each belongs to row i.

    block_tables  int32 [rows, columns]: the block ids of each row, num_blocks of them; the rest is stale
    tokens        int32 [rows, stride]: the token ids of each row, num_tokens of them; the rest is stale
    num_blocks    int64 [rows]: blocks in each row's table
    num_tokens    int64 [rows]: tokens known
    num_launched  int64 [rows]: tokens computed, or in batches that have not ended; may exceed num_tokens
    num_computed  int64 [rows]: tokens whose KV is confirmed, or in pending nodes that the row shares
    """

    def __init__(self, tables: Tables, tiers: Tiers) -> None:
        self._tables, self._tiers = tables, tiers
        tables.after_growth.append(self._renew)
        self._renew()

    def _renew(self) -> None:
        # Attributes, because every step reads them often.
        tables = self._tables
        self.block_tables, self.tokens = _read_only(tables.blocks[0]), _read_only(tables.tokens)
        self.num_blocks, self.num_tokens = _read_only(tables.num_blocks), _read_only(tables.num_tokens)
        self.num_launched, self.num_computed = _read_only(tables.num_launched), _read_only(tables.num_computed)

    @property
    def live(self) -> Rows:
        """int64 [n]: the rows that sequences hold, rising."""
        return self._tables.live_rows

    def table(self, row: int) -> NDArray[np.int32]:
        """The row's device blocks in order, int32 [n]; a copy."""
        return self._tables.blocks[0, row, : self._tables.num_blocks[row]].copy()

    @property
    def num_scheduled(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each row that are in flight; a copy."""
        return self._tables.num_launched - self._tables.num_computed

    def num_on_host(self, row: int) -> int:
        """Host blocks of the full group that the row holds."""
        return self._tiers.num_on_host(row)


class TierView:
    """Blocks of one tier: *free* (ref count 0, no content), *cached* (0, with content) or *used* (1 or more). Where a
    block takes several pages, counts and columns are of pages: each has the value of its block."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.num_blocks = pool, pool.num_pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    @property
    def num_available(self) -> int:
        """Blocks that can be drawn: free and cached ones."""
        return self._pool.num_available

    @property
    def usage(self) -> float:
        """Used blocks ÷ all blocks; 0 if the tier has none."""
        return self._pool.num_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """int32 [num_blocks]: references to each block."""
        return self._pool.by_page(self._pool.refs())

    @property
    def states(self) -> NDArray[np.int8]:
        """int8 [num_blocks]: 0 free, 1 cached, 2 used."""
        state = self._pool.by_page(self._pool.state)
        return np.where(state > 0, 2, np.where(state < 0, 1, 0)).astype(np.int8)

    @property
    def levels(self) -> NDArray[np.int8]:
        """int8 [num_blocks]: the priority of each block's content (`BlockManager.retain`), 0 if it is not retained.
        With `host_caching` a host block has 0 while the device has its content, too."""
        return self._pool.by_page(self._pool.level.clip(0))


class GroupTables:
    """The pages of n rows in one layer group. Each property reads the tables as they are at that moment.

    tables  int32 [n, columns, pages]: pages of each block; -1 in columns that a window or chunk released, and behind
            the end of a table. A state has one column
    written_from  int64 [n]: the first token of its share that each row has to write; earlier ones are content already
    read    int32 [n, pages], of states: where the state lies with which each row's share begins; -1: it begins at zero
    write   int32 [n, pages], of states: where the state after the last token of the share goes
    """

    def __init__(self, growth: Growth, group: int, rows: Rows, flight: Flight) -> None:
        self._tables, self._device, self._layout = growth.tables, growth.device, growth.layout
        # Forks may be added to the flight's arrays later.
        self._number, self._rows, self._flight, self._starts = group, rows, flight, flight.starts

    @property
    def is_of_states(self) -> bool:
        return self._layout.groups[self._number].kind == "state"

    @property
    def tables(self) -> NDArray[np.int32]:
        width = 1 if self.is_of_states else int(self._tables.num_blocks[self._rows].max(initial=0))
        return self.at(self._rows[:, None], rising(width))

    def at(self, rows: Rows, columns: Rows) -> NDArray[np.int32]:
        """The pages of each row's block in a column, int32 [..., pages]; -1 as in `tables`. `columns` broadcasts."""
        tables, table = self._tables, self._layout.table_of[self._number]
        is_there = (columns >= tables.first[table, rows]) & (columns < tables.num_blocks[rows])
        blocks = np.where(is_there, tables.blocks[table, rows, columns], -1)
        return self._device.pages_of(blocks, self._layout.groups[self._number].pages)

    @property
    def written_from(self) -> NDArray[np.int64]:
        found = np.zeros(len(self._rows), np.int64)
        if not self._layout.table_of[self._number]:
            for row, token in self._flight.written_from.items():
                found[self._rows == row] = token
        return found

    @property
    def write(self) -> NDArray[np.int32]:
        pages: NDArray[np.int32] = self.tables[:, 0]
        return pages

    @property
    def read(self) -> NDArray[np.int32]:
        pages: NDArray[np.int32] = np.where(self._starts[:, None] == 0, np.int32(-1), self.write)
        for row, read in self._flight.reads.items():
            for side, block in zip(self._layout.states, read.blocks, strict=True):
                if side.table == self._layout.table_of[self._number]:
                    pages[self._rows == row] = self._device.pages_of(np.array([block]), side.pages)
        return pages


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A layer group at one moment, in pages.

    used         held by rows and batches
    cached       with content, and not held
    passed       released so far because rows' windows or chunks passed them, counted for each row's table
    lost_tokens  tokens that the full group had behind hits which this group ended: it allowed the shortest
    wasted       of those used: parts of blocks without a computed token that the group has to keep
    on_host      cached pages of the host
    """

    group: LayerGroup
    used: int
    cached: int
    passed: int
    lost_tokens: int
    wasted: float = 0.0
    on_host: int = 0


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Figures of one moment.

    Each tier has its blocks by state. `usage` is used ÷ all device blocks. `fragmentation` is the share of slots in
    used device blocks that hold no computed token (0 if no block is used, or layers are of several kinds).

    `queries` counts admissions that looked, `query_tokens` their tokens, `hit_tokens` the tokens that they found. Of
    these, another row of the batch was still computing `pending_hit_tokens`; `host_hit_tokens` came from the host; and
    `device_hit_tokens` are the rest. All are 0 without a prefix cache. `recent` figures cover the last WINDOW lookups.

    `evicted_blocks` have left the device. Over these, `idle_steps` sums the steps (batches composed) that each was
    unused, `lifetime_steps` those since its run of content began. `offloaded_blocks` were copied to the host when they
    left the device, `loaded_blocks` back on a hit. Where blocks have several pages, all of these count pages. `groups`
    is empty unless layers are of several kinds.
    """

    num_blocks: int
    free: int
    cached: int
    used: int
    host_blocks: int
    host_free: int
    host_cached: int
    host_used: int
    usage: float
    fragmentation: float
    queries: int
    query_tokens: int
    hit_tokens: int
    pending_hit_tokens: int
    host_hit_tokens: int
    recent_query_tokens: int
    recent_hit_tokens: int
    evicted_blocks: int
    idle_steps: int
    lifetime_steps: int
    offloaded_blocks: int
    loaded_blocks: int
    groups: tuple[GroupStats, ...] = ()

    @property
    def device_hit_tokens(self) -> int:
        """Hit tokens that were on the device and computed."""
        return self.hit_tokens - self.pending_hit_tokens - self.host_hit_tokens

    @property
    def recent_hit_rate(self) -> float:
        """recent_hit_tokens ÷ recent_query_tokens; 0 before the first query."""
        return self.recent_hit_tokens / self.recent_query_tokens if self.recent_query_tokens else 0.0

    @property
    def mean_idle_steps(self) -> float:
        """Mean number of steps that an evicted block had been unused; 0 before the first eviction."""
        return self.idle_steps / self.evicted_blocks if self.evicted_blocks else 0.0

    @property
    def mean_lifetime_steps(self) -> float:
        """Mean number of steps from the beginning of an evicted block's content to its eviction; 0 before the first."""
        return self.lifetime_steps / self.evicted_blocks if self.evicted_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """hit_tokens ÷ query_tokens; 0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


def _read_only(column: NDArray[_Integer]) -> NDArray[_Integer]:
    view = column.view()
    view.setflags(write=False)
    return view
