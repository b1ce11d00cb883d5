"""The order in which free blocks are handed out.

Block ids are int64 in here and wherever they index a column: numpy gathers by int32 five times slower.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .runs import Run

Blocks = NDArray[np.int64]
# Nodes of a run: from one to before another.
Stretch = tuple["Run", int, int]
# Number, blocks in the order of their eviction, the nodes in them, and when they were put there. The nodes stretch by stretch and the last
# one of each first; or the run whose first nodes they are, last one first, as nearly all are on the device: a list would weigh more than
# a block's content; None where they are not known.
Segment = tuple[int, Blocks, "Run | list[Stretch] | None", int]
# Blocks in the order of their eviction, the nodes in them where they are known, and when they were put there.
Taken = tuple[Blocks, list[Stretch] | None, int]

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
        self._lowest = CachedQueue(state)
        self._queues = [self._lowest]

    def take_plain(self, count: int) -> Blocks:
        """Remove the `count` plain blocks on top of the stack, int64 [count]; the caller has seen that they are there."""
        top = self.num_plain
        self.num_plain = top - count
        return self._stack[top - count : top][::-1].copy()

    def take_cached(self, count: int) -> list[Taken]:
        """Remove the `count` cached blocks whose turn it is, a part for each segment that they stand in; the caller has seen that
        they are there."""
        self.num_cached -= count
        lowest = self._lowest
        if count <= lowest.num_cached:
            return lowest.take(count)
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

    def put_cached(self, blocks: Blocks, nodes: Run | list[Stretch] | None = None, level: int = 0) -> None:
        """Add blocks with content, the first to be evicted first; `nodes` says which they hold, if they are few stretches. No caller changes
        the array and the list from now on, as far as it is cached here."""
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

    def segments(self) -> list[tuple[Blocks, list[Stretch]]]:
        """The segments whose nodes are known: blocks in the order of their eviction, and the nodes."""
        return [
            (blocks, _stretches(nodes, 0, len(blocks)))
            for queue in self._queues
            for blocks, nodes in queue.live()
            if nodes is not None
        ]


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

    def take(self, count: int) -> list[Taken]:
        """Remove the first `count` blocks, which are there."""
        taken: list[Taken] = []
        wanted = count
        while wanted:
            if not self._swept:
                self._swept, self._segments = self._segments, self._swept
            number, blocks, nodes, when = self._swept.popleft()
            num_entries = num_live = len(blocks)
            if self._num_entries != self.num_cached:
                blocks, nodes = self._live(number, blocks, nodes)
                num_live = len(blocks)
            left = 0
            if num_live > wanted:
                left, rest = num_live - wanted, nodes
                if isinstance(nodes, list):
                    nodes, rest = _split(nodes, wanted)
                self._swept.appendleft((number, blocks[wanted:], rest, when))
                self._num_entries += left
                blocks, num_live = blocks[:wanted], wanted
            if num_live:
                taken.append((blocks, None if nodes is None else _stretches(nodes, left, num_live), when))
            self._num_entries -= num_entries
            self.num_cached -= num_live
            wanted -= num_live
        return taken

    def live(self) -> list[tuple[Blocks, Run | list[Stretch] | None]]:
        """What has not left, segment by segment: blocks, and the nodes in them where it is known."""
        return [self._live(*segment[:3]) for queue in (self._swept, self._segments) for segment in queue]

    def _live(
        self, number: int, blocks: Blocks, nodes: Run | list[Stretch] | None
    ) -> tuple[Blocks, Run | list[Stretch] | None]:
        """What of a segment has not left; where some has, the nodes in the rest are not known."""
        if self._num_entries == self.num_cached:
            return blocks, nodes
        is_live = self._state[blocks] == -number
        if is_live.all():
            return blocks, nodes
        return blocks[is_live], None

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


def _split(nodes: list[Stretch], count: int) -> tuple[list[Stretch], list[Stretch]]:
    """The `count` nodes that are evicted first, fewer than there are, and the others."""
    for i, (run, first, stop) in enumerate(nodes):
        if count < stop - first:
            if not count:
                return nodes[:i], nodes[i:]
            return [*nodes[:i], (run, stop - count, stop)], [(run, first, stop - count), *nodes[i + 1 :]]
        count -= stop - first
    return nodes, []


def _stretches(nodes: Run | list[Stretch], left: int, count: int) -> list[Stretch]:
    """`count` nodes as stretches; of a run, those that follow its first `left`."""
    return nodes if isinstance(nodes, list) else [(nodes, left, left + count)]
