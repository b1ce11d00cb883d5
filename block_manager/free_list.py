"""The order in which free blocks are drawn.

Block ids are int64 here and wherever they index a column: numpy gathers by int32 five times slower.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from .runs import Blocks, Span

# Number, blocks in eviction order, their nodes if these are one span, and the step that put them there.
Segment = tuple[int, Blocks, Span | None, int]
# Blocks in eviction order, their nodes if known, and the step that put them there.
Taken = tuple[Blocks, Span | None, int]

_NO_BLOCKS: Blocks = np.empty(0, np.int64)


class FreeList:
    """Blocks with ref count 0: *plain* ones without content, and *cached* ones by level, least recently used first.

    Plain blocks are a stack: the last one freed is still warm, and never-used ones lie at the bottom in rising order.
    Cached blocks have one queue a level, and lower levels are emptied first; all are at level 0 unless raised.
    """

    def __init__(self, state: NDArray[np.int64]) -> None:
        # The pool's column: of a cached block, minus the number of its segment.
        self._state = state
        self._stack = np.arange(len(state) - 1, -1, -1, dtype=np.int64)
        self.num_plain = len(state)
        self.num_cached = 0
        self._next_segment = 1
        # The step that puts blocks here.
        self.now = 0
        self._queues = [CachedQueue(state)]

    def take_plain(self, count: int) -> Blocks:
        """Remove the top `count` plain blocks, int64 [count]; they must be there."""
        top = self.num_plain
        self.num_plain = top - count
        return self._stack[top - count : top][::-1].copy()

    def take_cached(self, count: int) -> list[Taken]:
        """Remove the next `count` cached blocks, one part a segment; they must be there."""
        self.num_cached -= count
        taken: list[Taken] = []
        for queue in self._queues:
            part = min(count, queue.num_cached)
            if part:
                taken += queue.take(part)
                count -= part
        return taken

    def take_out(self, count: int, level: int = 0) -> None:
        """Count out cached blocks that a prefix hit uses again; their new state removes them from the queue."""
        self.num_cached -= count
        self._queues[level].num_cached -= count

    def put_plain(self, blocks: Blocks) -> None:
        """Add blocks without content; the last one is taken next."""
        top = self.num_plain
        self.num_plain = top + len(blocks)
        self._stack[top : self.num_plain] = blocks

    def put_one(self, block: int) -> None:
        self._stack[self.num_plain] = block
        self.num_plain += 1

    def put_cached(self, blocks: Blocks, nodes: Span | None = None, level: int = 0) -> None:
        """Add blocks, the first evicted first. `nodes`: those in them as one span, last first. Takes over the array."""
        number = self._next_segment
        self._next_segment = number + 1
        self._state[blocks] = -number
        self.num_cached += len(blocks)
        while level >= len(self._queues):
            self._queues.append(CachedQueue(self._state))
        self._queues[level].put((number, blocks, nodes, self.now))

    def plain(self) -> Blocks:
        """The plain blocks in the order in which they are taken, int64 [num_plain]; a copy."""
        return self._stack[: self.num_plain][::-1].copy()

    def cached(self) -> Blocks:
        """The cached blocks in eviction order, int64 [num_cached]; a copy."""
        return np.concatenate(self.cached_by_level())

    def cached_by_level(self) -> list[Blocks]:
        return [np.concatenate([_NO_BLOCKS, *(blocks for blocks, _ in queue.live())]) for queue in self._queues]

    @property
    def num_cached_by_level(self) -> int:
        """The sum of the queues' counts; for the checker."""
        return sum(queue.num_cached for queue in self._queues)

    def spans(self) -> list[tuple[Blocks, Span]]:
        """Segments whose nodes are known: blocks in eviction order, and the nodes; for the checker."""
        return [(blocks, nodes) for queue in self._queues for blocks, nodes in queue.live() if nodes is not None]


class CachedQueue:
    """Cached blocks of one level, least recently used first.

    A queue of *segments*, one a release: a release of any length is one append and one scatter. A prefix hit takes
    blocks out of the middle by changing their state, in O(its blocks). Stale entries are skipped when their turn comes,
    and swept at twice the rate at which releases add entries: they never outgrow the live ones by much, and no release
    compacts the whole queue.

        | swept segments | segments not swept yet | <- releases append here
          ^ takes come from here
    """

    def __init__(self, state: NDArray[np.int64]) -> None:
        self._state = state
        self.num_cached = 0
        self._swept: deque[Segment] = deque()
        self._segments: deque[Segment] = deque()
        self._num_entries = 0

    def put(self, segment: Segment) -> None:
        """Append a segment, which its blocks' state names already."""
        count = len(segment[1])
        self._segments.append(segment)
        self.num_cached += count
        self._num_entries += count
        if self._num_entries > 2 * self.num_cached + 64:
            self._sweep(2 * count)

    def take(self, wanted: int) -> list[Taken]:
        """Remove the first `wanted` blocks; they must be there."""
        taken: list[Taken] = []
        while wanted:
            if not self._swept:
                self._swept, self._segments = self._segments, self._swept
            number, blocks, nodes, when = self._swept.popleft()
            live, nodes = self._live(number, blocks, nodes)
            self._num_entries -= len(blocks)
            if len(live) > wanted:
                rest = None
                if nodes is not None:
                    run, first, stop = nodes
                    nodes, rest = (run, stop - wanted, stop), (run, first, stop - wanted)
                self._swept.appendleft((number, live[wanted:], rest, when))
                self._num_entries += len(live) - wanted
                live = live[:wanted]
            if len(live):
                taken.append((live, nodes, when))
            self.num_cached -= len(live)
            wanted -= len(live)
        return taken

    def live(self) -> list[tuple[Blocks, Span | None]]:
        """Segment by segment, the blocks that have not left, and their nodes if known."""
        return [self._live(*segment[:3]) for queue in (self._swept, self._segments) for segment in queue]

    def _live(self, number: int, blocks: Blocks, nodes: Span | None) -> tuple[Blocks, Span | None]:
        """The blocks of a segment that have not left; if some have, the nodes of the rest are unknown."""
        if self._num_entries == self.num_cached:
            return blocks, nodes
        is_live = self._state[blocks] == -number
        return (blocks, nodes) if is_live.all() else (blocks[is_live], None)

    def _sweep(self, work: int) -> None:
        """Check about `work` entries that this round has not checked, and drop the stale ones."""
        while work > 0 and self._num_entries > self.num_cached:
            if not self._segments:
                # All entries are checked: begin a new round.
                self._swept, self._segments = self._segments, self._swept
            number, blocks, nodes, when = self._segments.popleft()
            live, nodes = self._live(number, blocks, nodes)
            self._num_entries += len(live) - len(blocks)
            work -= len(blocks)
            if len(live):
                self._swept.append((number, live, nodes, when))
