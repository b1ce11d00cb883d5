"""Content that is evicted later than the rest, for good or until a logical time.

A retention raises the level of a node and of all before it, so that a child is never kept longer than its parent; what is not retained
is at level 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from paged.base.arguments import logical_time
from paged.errors import InvalidConfig

from .pool import Pool
from .runs import Run, upwards


class Retentions:
    """Levels of content in the pools of all places, and when they end."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        # The latest logical time that was told.
        self.now = -np.inf
        self._next = 1
        # A heap of retentions that end: when, their number, and their runs, last one first.
        self._ends: list[tuple[float, int, list[Run]]] = []
        # The first logical time at which anything ends: before it, `expire` need not be called.
        self.next_end = np.inf

    def retain(self, run: Run, at: int, level: int, until: float | None) -> None:
        """A node and all before it are kept at `level` at least, until the logical time `until` (None: as long as they live). Raises
        InvalidConfig for `until`."""
        way = list(upwards(run, at))
        if until is not None:
            until = logical_time("until", until)
            if not self.now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self.now}; got {until!r}.")
            heapq.heappush(self._ends, (until, self._next, [each for each, _ in way]))
            self.next_end = self._ends[0][0]
        for each, last in way:
            each.retain(self._next, last, level)
        self._next += 1
        # The last node first: what is evicted first becomes old first.
        for each, last in way:
            self.apply_to(each, renewed=(last, level))

    def expire(self, now: float) -> None:
        """What was to end by the logical time `now` has ended. A time before one that was told already changes nothing."""
        self.now = max(self.now, now)
        while self._ends and self._ends[0][0] <= self.now:
            _, number, runs = heapq.heappop(self._ends)
            for run in runs:
                if run.retained is not None:
                    run.retained.pop(number, None)
                self.apply_to(run)
        self.next_end = self._ends[0][0] if self._ends else np.inf

    def clear(self) -> None:
        """All content is forgotten."""
        self._ends.clear()
        self.next_end = np.inf

    def apply_to(self, run: Run, renewed: tuple[int, int] | None = None) -> None:
        """The blocks of a run's nodes are kept as its retentions say. On the device those of an open run, which its row holds, wait until
        it is closed.

        `renewed`, (last node, level): those up to it that are at this level already become the newest of it again, or nodes that are
        raised to it now would outlive their parents.
        """
        for pool, there in zip(self._pools, run.blocks, strict=True):
            if there is None:
                continue
            offsets = (there >= 0).nonzero()[0]
            blocks, levels = there[offsets], run.levels_of(offsets)
            changed = levels != (0 if pool.level is None else pool.level[blocks])
            if renewed is not None:
                changed |= (offsets <= renewed[0]) & (levels == renewed[1])
            if changed.any():
                pool.set_levels(blocks[changed], levels[changed])
