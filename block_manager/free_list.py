"""The order in which free blocks are handed out.

Block ids are int64 in here and wherever they index a column: numpy gathers by int32 five times slower.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from .runs import Blocks, Span

# Number, blocks in the order of their eviction, the nodes in them where they are one span, and when they were put there.
Segment = tuple[int, Blocks, Span | None, int]
# Blocks in the order of their eviction, the nodes in them where they are known, and when they were put there.
Taken = tuple[Blocks, Span | None, int]

_NO_BLOCKS: Blocks = np.empty(0, np.int64)


class FreeList:
    """Blocks with ref count 0: `plain` ones without content, and `cached` ones, least recently used first, level by level.

    Plain blocks are a stack: the last one freed is still warm, and the never-used ones lie at its bottom in rising order. Cached
    blocks stand in one queue a level, and the lower levels are emptied first; all of them are at level 0 unless some were raised.
    """

    def __init__(self, state: NDArray[np.int64]) -> None:
        # The pool's column: a cached block's entry is minus the number of the segment it stands in.
        self._state = state
        self._stack = np.arange(len(state) - 1, -1, -1, dtype=np.int64)
        self.num_plain = len(state)
        self.num_cached = 0
        self._next_segment = 1
        # The step that puts blocks here.
        self.now = 0
        self._queues = [CachedQueue(state)]

    def take_plain(self, count: int) -> Blocks:
        """Remove the `count` plain blocks on top of the stack, int64 [count]; the caller has seen that they are there."""
        top = self.num_plain
        self.num_plain = top - count
        return self._stack[top - count : top][::-1].copy()

    def take_cached(self, count: int) -> list[Taken]:
        """Remove the `count` cached blocks whose turn it is, a part for each segment that they stand in; the caller has seen that
        they are there."""
        self.num_cached -= count
        taken: list[Taken] = []
        for queue in self._queues:
            part = min(count, queue.num_cached)
            if part:
                taken += queue.take(part)
                count -= part
        return taken

    def take_out(self, count: int, level: int = 0) -> None:
        """So many cached blocks of a level have left by a change of their state: a prefix hit uses them again."""
        self.num_cached -= count
        self._queues[level].num_cached -= count

    def put_plain(self, blocks: Blocks) -> None:
        """Add blocks without content; the last one is the next to be taken."""
        top = self.num_plain
        self.num_plain = top + len(blocks)
        self._stack[top : self.num_plain] = blocks

    def put_one(self, block: int) -> None:
        """Add one block without content; it is the next to be taken."""
        self._stack[self.num_plain] = block
        self.num_plain += 1

    def put_cached(self, blocks: Blocks, nodes: Span | None = None, level: int = 0) -> None:
        """Add blocks with content, the first to be evicted first; `nodes` are those in them, last one first, where they are one span. The
        array belongs to the list from now on."""
        number = self._next_segment
        self._next_segment = number + 1
        self._state[blocks] = -number
        self.num_cached += len(blocks)
        while level >= len(self._queues):
            self._queues.append(CachedQueue(self._state))
        self._queues[level].put((number, blocks, nodes, self.now))

    def plain(self) -> Blocks:
        """The plain blocks in the order in which they will be taken, int64 [num_plain]; a copy."""
        return self._stack[: self.num_plain][::-1].copy()

    def cached(self) -> Blocks:
        """The cached blocks in the order in which they will be evicted, int64 [num_cached]; a copy."""
        return np.concatenate(self.cached_by_level())

    def cached_by_level(self) -> list[Blocks]:
        """`cached`, a level each."""
        return [np.concatenate([_NO_BLOCKS, *(blocks for blocks, _ in queue.live())]) for queue in self._queues]

    @property
    def num_cached_by_level(self) -> int:
        """What the queues count, together; for the checker."""
        return sum(queue.num_cached for queue in self._queues)

    def spans(self) -> list[tuple[Blocks, Span]]:
        """The segments whose nodes are known: blocks in the order of their eviction, and the nodes; for the checker."""
        return [(blocks, nodes) for queue in self._queues for blocks, nodes in queue.live() if nodes is not None]


class CachedQueue:
    """Cached blocks of one level, least recently used first.

    A queue of *segments*, one a release, so that a release is one append and one scatter whatever its length. A prefix hit takes
    blocks out of the middle by forgetting which segment they belong to; what is then stale in a segment is skipped when its turn comes,
    and swept at twice the rate at which releases add entries, so that a hit costs O(its blocks), no release pays for a compaction of the
    whole queue, and stale entries never outgrow the live ones by much.

        | swept segments | segments not looked at since | <- releases append here
          ^ takes come from here
    """

    def __init__(self, state: NDArray[np.int64]) -> None:
        self._state = state
        self.num_cached = 0
        self._swept: deque[Segment] = deque()
        self._segments: deque[Segment] = deque()
        self._num_entries = 0

    def put(self, segment: Segment) -> None:
        """Blocks whose state names this segment already are the last in line."""
        count = len(segment[1])
        self._segments.append(segment)
        self.num_cached += count
        self._num_entries += count
        if self._num_entries > 2 * self.num_cached + 64:
            self._sweep(2 * count)

    def take(self, wanted: int) -> list[Taken]:
        """Remove the first `wanted` blocks, which are there."""
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
        """What has not left, segment by segment: blocks, and the nodes in them where they are known."""
        return [self._live(*segment[:3]) for queue in (self._swept, self._segments) for segment in queue]

    def _live(self, number: int, blocks: Blocks, nodes: Span | None) -> tuple[Blocks, Span | None]:
        """What of a segment has not left; where some has, the nodes in the rest are not known."""
        if self._num_entries == self.num_cached:
            return blocks, nodes
        is_live = self._state[blocks] == -number
        return (blocks, nodes) if is_live.all() else (blocks[is_live], None)

    def _sweep(self, work: int) -> None:
        """Look at about `work` entries that have not been looked at this round, and forget the stale ones among them."""
        while work > 0 and self._num_entries > self.num_cached:
            if not self._segments:
                # Everything has been looked at once: begin a new round.
                self._swept, self._segments = self._segments, self._swept
            number, blocks, nodes, when = self._segments.popleft()
            live, nodes = self._live(number, blocks, nodes)
            self._num_entries += len(live) - len(blocks)
            work -= len(blocks)
            if len(live):
                self._swept.append((number, live, nodes, when))
