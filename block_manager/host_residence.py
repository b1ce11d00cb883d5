"""Which nodes reside in which host blocks: a column by host block, and an array by run.

On the device the nodes of a run go last one first, so how many are left says it all; on the host they come and go as swap and
eviction take them. Knows runs and the host pool. Does not know why a node is there, nor who copies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from block_manager.free_list import Blocks
from block_manager.pool import Pool
from block_manager.runs import Run

if TYPE_CHECKING:
    from block_manager.events import EventLog


class HostResidence:
    """Finds, notes and forgets the host blocks of nodes."""

    def __init__(self, host: Pool, trim: Callable[[Run], None]) -> None:
        self._host = host
        # By host block, the place of its node in its run, -1 where it carries none.
        self._offset = np.full(host.num_blocks, -1, np.int64)
        # Told what nodes come and go, while somebody wants to know.
        self.log: EventLog | None = None
        # Called with a run that lost nodes here, which may have been their last residence.
        self._trim = trim
        host.forget = self._forget

    def put(self, run: Run, offsets: NDArray[np.int64], blocks: Blocks) -> None:
        """Nodes `offsets` of a run, rising, which have no host block, reside in these used ones from now on; both int64 [n]."""
        places = run.host_places(max(run.length, int(offsets[-1]) + 1))
        places[offsets] = blocks
        run.num_host += len(blocks)
        self._host.carry(blocks, run)
        self._offset[blocks] = offsets
        if run.retained:
            self._host.set_levels(blocks, run.levels_of(offsets))
        if self.log is not None:
            self._tell(self.log.came, run, offsets)

    def offsets(self, blocks: Blocks) -> list[int]:
        """The place of each host block's node in its run, -1 where it carries none."""
        found: list[int] = self._offset[blocks].tolist()
        return found

    def clear(self) -> None:
        """No host block carries a node; the caller has seen that none is used."""
        self._host.forget_all()
        self._offset[:] = -1

    def _forget(self, blocks: Blocks) -> None:
        """These blocks, evicted oldest first, hold their nodes no more."""
        if not len(blocks):
            # All that stood in a segment had left it.
            return
        runs, offsets = self._host.run[blocks].tolist(), self._offset[blocks]
        self._offset[blocks] = -1
        if runs[0] is runs[-1]:
            # Blocks of one path, which goes through each run once; most are of one run.
            self._lose(runs[0], offsets)
            return
        last, first = len(runs) - 1, 0
        for i, run in enumerate(runs):
            if i == last or runs[i + 1] is not run:
                self._lose(run, offsets[first : i + 1])
                first = i + 1

    def _lose(self, run: Run, offsets: NDArray[np.int64]) -> None:
        """These nodes of a run are on the host no more."""
        assert run.host is not None, "it had host blocks"
        run.host[offsets] = -1
        run.num_host -= len(offsets)
        if self.log is not None:
            self._tell(self.log.left, run, offsets)
        if run.row < 0:
            self._trim(run)

    def _tell(self, tell: Callable[[Run, str, int, int], None], run: Run, offsets: NDArray[np.int64]) -> None:
        first, last = int(offsets.min()), int(offsets.max())
        if last - first + 1 == len(offsets):
            tell(run, "host", first, last + 1)
            return
        for at in offsets.tolist():
            tell(run, "host", at, at + 1)
