"""Rows that go to the host and come back, and blocks that loads hold: calls that trust their caller, as those of a step do.

Knows both tiers. Does not know why a row is swapped, nor what a copy costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .free_list import Blocks
from .moves import Moves
from .tables import Rows
from .trusted_stretches import StretchCalls


class MoveCalls(StretchCalls):
    """Swap, what it would take, and references beyond the tables."""

    def give_to_host(self, rows: Rows, keep: int) -> Moves:
        """`swap_out` of rows that the caller vouches for, with its own copies only. Raises OutOfBlocks, changing nothing."""
        return self._tiers.swap_out(rows, keep)

    def take_from_host(self, rows: Rows) -> Moves:
        """`swap_in` of rows that the caller vouches for, with its own copies only. Raises OutOfBlocks, changing nothing."""
        rows = rows[self._tables.is_swapped[rows]]
        before = self._tables.num_blocks[rows]
        moves = self._tiers.swap_in(rows)
        for row, start in zip(rows.tolist(), before.tolist(), strict=True):
            self._growth.note(row, start)
            self._note_shared_tail(row)
        return moves

    def host_blocks_for_swap(self, rows: list[int], keep: int = 0) -> int:
        """Host blocks that `swap_out` would take; it fits if host_free + host_cached is at least that.

        Closes the rows' open runs, as a preemption of either kind does.
        """
        return self._tiers.host_blocks_wanted(np.array(rows, np.int64), keep)

    def blocks_to_return(self, rows: list[int]) -> int:
        """Device blocks that `swap_in` of these rows would take from what is available."""
        return self._tiers.device_blocks_wanted(np.array(rows, np.int64))

    def num_host_tail(self, row: int) -> int:
        """Host blocks that the row holds."""
        return len(self._tiers.tails.get(row, ()))

    def load_where(self, is_worth_loading: Callable[[int, int], bool]) -> None:
        """A hit on content that only the host has is loaded where this says so, given the first position and the one after the
        last; the rest is computed. Without it all is loaded."""
        if self._offload is not None:
            self._offload.is_worth_loading = is_worth_loading

    def hold(self, blocks: Blocks) -> None:
        """One more reference to each of these used or cached device blocks, into which something is still being loaded."""
        self._device.keep(blocks)

    def release_held(self, blocks: Blocks) -> None:
        """Give back what `hold` took."""
        self._device.let_go(blocks)
