"""Content that is evicted later than the rest, for good or until a logical time.

A retention raises the level of a node and of all before it, so that a child is never kept longer than its parent; what is not retained
is at level 0.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import logical_time
from paged.errors import InvalidConfig

from .free_list import Blocks
from .pool import Pool
from .prefix_index import PrefixIndex
from .runs import Run, Segment


class Retentions:
    """Levels of content, and when they end."""

    def __init__(self, index: PrefixIndex | None, device: Pool, host: Pool) -> None:
        """Without an index there is no content, and nothing is ever kept."""
        self._index = index
        if index is not None:
            index.closed = self.apply_to
        self._device, self._host = device, host
        # The latest logical time that was told.
        self.now = -np.inf
        # The first logical time at which anything ends: before it, `expire` need not be called.
        self.next_end = np.inf
        self._next = 1
        # The runs of each retention that ends, by number, last one first; (when, number) in order.
        self._until: dict[int, list[Run]] = {}
        self._ends: list[tuple[float, int]] = []

    def retain(self, segments: list[Segment], level: int, until: float | None) -> None:
        """The nodes of a prefix are kept at `level` at least, until the logical time `until` (None: as long as they live)."""
        number = self._numbered(until)
        run, offset, count = segments[-1]
        way = _upwards(run, offset + count - 1)
        for each, last in way:
            if each.retained is None:
                each.retained = {}
            each.retained[number] = (last, level)
        if until is not None:
            self._until[number] = [each for each, _ in way]
        # The last node first: what is evicted first becomes old first.
        for each, last in way:
            self.apply_to(each, renewed=(last, level))

    def expire(self, now: float) -> None:
        """What was to end by the logical time `now` has ended. A time before one that was told already changes nothing."""
        self.now = max(self.now, now)
        while self._ends and self._ends[0][0] <= self.now:
            _, number = heapq.heappop(self._ends)
            if number in self._until:
                for run in self._until.pop(number):
                    if run.retained is not None:
                        run.retained.pop(number, None)
                    self.apply_to(run)
        self._note_next_end()

    def clear(self) -> None:
        """All content is forgotten."""
        self._until.clear()
        self._ends.clear()
        self._note_next_end()

    def _numbered(self, until: float | None) -> int:
        number = self._next
        if until is not None:
            until = logical_time("until", until)
            if not self.now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self.now}; got {until!r}.")
            heapq.heappush(self._ends, (until, number))
            self._note_next_end()
        self._next += 1
        return number

    def _note_next_end(self) -> None:
        self.next_end = self._ends[0][0] if self._ends else np.inf

    def apply_to(self, run: Run, renewed: tuple[int, int] | None = None) -> None:
        """The blocks of a run's nodes are kept as its retentions say. On the device those of an open run, which its row holds, wait until
        it is closed.

        `renewed`, (last node, level): those up to it that are at this level already become the newest of it again, or nodes that are
        raised to it now would outlive their parents.
        """
        if run.row < 0 and run.num_device and run.blocks is not None:
            self._set(self._device, run, np.arange(run.num_device), run.blocks[0, : run.num_device], renewed)
        if run.num_host and run.host is not None:
            places = (run.host >= 0).nonzero()[0]
            self._set(self._host, run, places, run.host[places], renewed)

    def _set(
        self, pool: Pool, run: Run, places: NDArray[np.int64], blocks: Blocks, renewed: tuple[int, int] | None
    ) -> None:
        levels = run.levels_of(places)
        before = np.zeros(len(blocks), np.int8) if pool.level is None else pool.level[blocks]
        changed = levels != before
        if renewed is not None:
            changed |= (places <= renewed[0]) & (levels == renewed[1])
        if changed.any():
            pool.set_levels(blocks[changed], levels[changed])


def _upwards(run: Run | None, at: int) -> list[tuple[Run, int]]:
    """Each run on the way from a node to the root, with the last of its nodes on it."""
    found: list[tuple[Run, int]] = []
    while run is not None:
        found.append((run, at))
        at, run = run.at, run.parent
    return found
