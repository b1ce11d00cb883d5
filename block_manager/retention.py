"""Content that is evicted later than the rest, for good or until a logical time.

A retention raises the level, 0 to 3, of a node and of all before it: no child is kept longer than its parent.
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
    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self.now = -np.inf
        self._next = 1
        # Heap of the retentions that end: when, their number, and their runs, last one first.
        self._ends: list[tuple[float, int, list[Run]]] = []
        # The first logical time at which a retention ends: `expire` does nothing before it.
        self.next_end = np.inf

    def retain(self, run: Run, at: int, level: int, until: float | None) -> None:
        """Keep a node and all before it at `level` or higher until the logical time `until` (None: as long as they
        live). Raises InvalidConfig for `until`."""
        way, number = list(upwards(run, at)), self._next
        if until is not None:
            until = logical_time("until", until)
            if not self.now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self.now}; got {until!r}.")
            heapq.heappush(self._ends, (until, number, [each for each, _ in way]))
            self.next_end = self._ends[0][0]
        # First: this may raise MemoryError below, and no two have one number.
        self._next += 1
        # Last run first: children become old, and are evicted, before parents.
        for each, last in way:
            each.retain(number, last, level)
            self.apply_to(each, renewed=(last, level))

    def extend(self, run: Run, at: int, end: Run) -> None:
        """Keep what hangs off a node, one node of its own, as long and as high as that."""
        for number, (last, level) in run.retained.items():
            if last >= at:
                end.retain(number, 0, level)
                for _, its, runs in self._ends:
                    if its == number:
                        # First: it becomes old before its parent.
                        runs.insert(0, end)
        if end.retained:
            self.apply_to(end)

    def reach(self, now: float) -> None:
        """Note that it is the logical time `now`, by which no retention ends (`next_end`)."""
        self.now = max(self.now, now)

    def expire(self, now: float) -> None:
        """End the retentions until the logical time `now`, or before. An earlier time than before changes nothing."""
        self.reach(now)
        while self._ends and self._ends[0][0] <= self.now:
            _, number, runs = heapq.heappop(self._ends)
            for run in runs:
                run.retained.pop(number, None)
                self.apply_to(run)
        self.next_end = self._ends[0][0] if self._ends else np.inf

    def clear(self) -> None:
        self._ends.clear()
        self.next_end = np.inf

    def apply_to(self, run: Run, renewed: tuple[int, int] | None = None) -> None:
        """Set levels of the run's blocks as its retentions say; those of an open run on the device wait until it
        closes. `renewed`, (last node, level): blocks up to it at this level become newest, so that no child outlives
        its parent."""
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
