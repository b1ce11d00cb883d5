"""What anyone may read of the memory layer at any time: columns by row, and blocks by state.

Knows where the figures are. Changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .pool import Pool
from .tables import Rows, Tables
from .tiers import Tiers


class Views:
    """The readable side of a BlockManager. Arrays are read-only views of the live columns, valid until a row
    is added or told more tokens, unless said to be copies."""

    num_blocks: int
    _tables: Tables
    _device: Pool
    _host: Pool
    _tiers: Tiers
    _batch: int

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """int32 [rows, columns]: entry (row, column) for column < num_table_blocks[row]; the rest is stale. A view."""
        return self._tables.read_only_blocks

    @property
    def num_table_blocks(self) -> NDArray[np.int64]:
        """int64 [rows]: blocks in each row's table."""
        return self._tables.shown.num_blocks

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens known of each row."""
        return self._tables.shown.num_tokens

    @property
    def num_computed(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each row whose KV is confirmed (with what it shares of pending nodes)."""
        return self._tables.shown.num_computed

    @property
    def num_launched(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each row that are computed or in batches that have not ended; may exceed num_tokens."""
        return self._tables.shown.num_launched

    @property
    def num_scheduled(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each row that are in flight; a copy."""
        return self._tables.num_launched - self._tables.num_computed

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [rows, stride]: the token ids of each row, num_tokens of them; the rest is stale."""
        return self._tables.shown.tokens

    @property
    def live_rows(self) -> Rows:
        """int64 [n]: the rows that sequences hold, rising."""
        return self._tables.live_rows

    def is_in_flight(self, row: int) -> bool:
        """Whether a batch that has not ended computes tokens of the row that it still holds."""
        return bool(self._tables.num_launched[row] != self._tables.num_computed[row])

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """int32 [num_blocks]: references to each device block; a copy."""
        return self._device.ref_count

    def ref_counts_of(self, row: int) -> NDArray[np.int32]:
        """int32 [num_table_blocks[row]]: references to each block of the row's table, in order."""
        return self._device.refs(self._tables.blocks[0, row, : self._tables.num_blocks[row]].astype(np.int64))

    def block_states(self) -> NDArray[np.int8]:
        """int8 [num_blocks]: 0 free, 1 cached, 2 used, of each device block."""
        state = self._device.state
        return np.where(state > 0, 2, np.where(state < 0, 1, 0)).astype(np.int8)

    def block_levels(self) -> NDArray[np.int8]:
        """int8 [num_blocks]: how long the content of each device block is kept, 0 where it is not retained; see `retain`. A copy."""
        level = self._device.level
        return np.zeros(self.num_blocks, np.int8) if level is None else level.copy()

    @property
    def batch(self) -> int:
        """Number of the batch that is being composed; see next_batch."""
        return self._batch

    @property
    def host_ref_counts(self) -> NDArray[np.int32]:
        """int32 [num_host_blocks]: references to each host block; a copy."""
        return self._host.ref_count

    @property
    def num_free(self) -> int:
        """Device blocks with ref count 0 and no content."""
        return self._device.num_free

    @property
    def num_cached(self) -> int:
        """Device blocks with ref count 0 and content."""
        return self._device.num_cached

    @property
    def num_used(self) -> int:
        """Device blocks with a ref count of at least 1."""
        return self._device.num_used

    @property
    def num_available(self) -> int:
        """Device blocks that can be drawn: free and cached."""
        return self._device.num_available

    @property
    def host_free(self) -> int:
        """Host blocks with ref count 0 and no content."""
        return self._host.num_free

    @property
    def host_cached(self) -> int:
        """Host blocks with ref count 0 and content."""
        return self._host.num_cached

    @property
    def host_used(self) -> int:
        """Host blocks that a swapped row holds."""
        return self._host.num_used

    @property
    def usage(self) -> float:
        """Used device blocks ÷ all device blocks."""
        return self._device.num_used / self.num_blocks
