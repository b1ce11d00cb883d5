"""All blocks of one tier: their references, the content that each one carries, and the order in which free ones are drawn.

Block ids are int64 here and wherever they index a column: numpy gathers by int32 five times slower.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import logical_time
from paged.errors import InvalidConfig, OutOfBlocks

from .runs import DEVICE, HOST, NO_BLOCKS, NUM_PLACES, Blocks, Reach, Run

# Number, blocks in eviction order, and the step that released them.
Segment = tuple[int, Blocks, int]

# The bit of a used block's state that marks a node in it.
_CONTENT = 1 << 40
_REFERENCES = _CONTENT - 1
# States of blocks with one holder, as bytes: comparing bytes costs a tenth of a numpy reduction.
_PATTERN = 1024
_SOLE_WITH_CONTENT = np.full(_PATTERN, _CONTENT + 1, np.int64).tobytes()
_SOLE_PLAIN = np.full(_PATTERN, 1, np.int64).tobytes()
# In the order in which they go: of host blocks whose content the device has, too, and of retention, 0 for content without any.
DOUBLED = -1
_LEVELS = (DOUBLED, 0, 1, 2, 3)
# A retention's number, and the runs that it is of, last one first.
Retained = tuple[int, list[Run]]
_Number = TypeVar("_Number", bound=np.integer)


class Pool:
    """`num_blocks` blocks, each *used* (ref count ≥ 1), *cached* (0, with content) or *free* (0, without).

    Free blocks are drawn first. They are a stack: the last one released is still warm, and never-used ones lie at the
    bottom in rising order. Cached blocks have one queue a level, and lower levels are emptied first.

    `state` int64 [num_blocks] is 0 if free, minus its segment in a queue if cached, the ref count if used (plus one
    high bit with a node): a release is one read and one write. `run` object [num_blocks] is the run of its node.

    A block may take several pages, which are the blocks of `num_blocks`; it is named by the first of them, and only that
    one has a state. `most_pages`: of any block. Free and available ones are counted in pages. One that `grows` has blocks
    that cost nothing, and never lacks any.
    """

    def __init__(self, num_blocks: int, tier: str, most_pages: int = 1, *, grows: bool = False) -> None:
        self.num_blocks = num_blocks
        self.tier = tier
        self.state = np.zeros(num_blocks, np.int64)
        self.run: NDArray[np.object_] = np.empty(num_blocks, object)
        # By block: the place in whose terms it carries its node, and whether that was released to be evicted next; None in one place.
        self.place: NDArray[np.int8] | None = None
        self.goes_next: NDArray[np.bool_] | None = None
        # Higher levels are evicted later; whether any was ever raised.
        self.level, self._is_raised = np.zeros(num_blocks, np.int8), False
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        numbers = itertools.count(1)
        self.queues = {level: CachedQueue(self, numbers) for level in _LEVELS}
        self.num_free, self.num_cached = num_blocks, 0
        self._step = 0
        # Blocks evicted so far, and the sum of the steps that each was unused.
        self.num_evicted = self.idle_steps = 0
        # References beyond the tables, by block: of loads that have not ended.
        self.kept: Counter[int] = Counter()
        self._forget: Callable[[list[Blocks], Blocks], None] = lambda taken, blocks: None
        self._choose: Callable[[int, int], None] | None = None
        self._grows = grows
        # How many pages each block has, int16 [num_blocks] (None: one), and which, int32 [num_blocks, most_pages].
        self._width: NDArray[np.int16] | None = None
        if most_pages > 1:
            self._width = np.ones(num_blocks, np.int16)
            self._pages = np.zeros((num_blocks, most_pages), np.int32)

    @property
    def num_available(self) -> int:
        """Blocks that can be drawn: free and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def begin_step(self, number: int) -> None:
        """Begin the step `number`: what is released from now on is unused from then on."""
        self._step = number

    def on_eviction(self, forget: Callable[[list[Blocks], Blocks], None], *, has_places: bool = False) -> None:
        """Call `forget` with evicted blocks, oldest first, in parts and as one array: their nodes lose this residence.
        `has_places`: the blocks lie in several places, those of a release in one."""
        self._forget = forget
        if has_places:
            self.place, self.goes_next = np.zeros(self.num_blocks, np.int8), np.zeros(self.num_blocks, np.bool_)

    def on_raised(self, choose: Callable[[int, int], None]) -> None:
        """Call `choose` with a level and a number of blocks before so many of a raised level are evicted: it may put others
        of that level first."""
        self._choose = choose

    def refs(self, blocks: Blocks | NDArray[np.int32] | slice | int = slice(None)) -> Any:
        """References to each of these blocks, int32 or int32 [n]; to all; a copy."""
        return (np.maximum(self.state[blocks], 0) & _REFERENCES).astype(np.int32)

    def has_content(self, blocks: Blocks | slice | int) -> Any:
        """bool, or bool [n]: whether each of these blocks, used or not, carries a node."""
        state = self.state[blocks]
        return (state < 0) | (state >= _CONTENT)

    def require(self, count: int) -> None:
        """Raise OutOfBlocks when fewer than `count` blocks can be drawn; one that grows has them then, and twice as many."""
        if count <= self.num_available:
            return
        if not self._grows:
            raise OutOfBlocks(count, self.num_available, self.tier)
        more = max(self.num_blocks, count)
        self.state = np.concatenate([self.state, np.zeros(more, np.int64)])
        self.run = np.concatenate([self.run, np.empty(more, object)])
        self.level = np.concatenate([self.level, np.zeros(more, np.int8)])
        self._stack = np.concatenate([np.arange(self.num_blocks + more - 1, self.num_blocks - 1, -1), self._stack])
        self.num_blocks += more
        self.num_free += more

    def draw(self, count: int, pages: int = 1) -> Blocks:
        """Draw `count` blocks of `pages` pages, ref count 1, int64 [count]; evict if need be. Raises OutOfBlocks."""
        num_pages = count * pages
        if num_pages > self.num_free:
            self.require(num_pages)
        num_free = self.num_free
        if num_pages > num_free and self._width is None:
            free = self._take_free(num_free)
            blocks = self._evicted(num_pages - num_free)
            blocks = np.concatenate([free, blocks]) if num_free else blocks
        else:
            self.make_room(num_pages)
            blocks = self._take_free(num_pages)
        if self._width is not None:
            drawn = blocks.reshape(count, pages)
            blocks = drawn[:, 0].copy()
            self._width[blocks] = pages
            self._pages[blocks, :pages] = drawn
        self.state[blocks] = 1
        return blocks

    def make_room(self, num_pages: int) -> None:
        """Evict until so many pages, which are available, are free: once for several draws."""
        while (missing := num_pages - self.num_free) > 0:
            self._put_free(self._evicted(missing))

    def _evicted(self, num_pages: int) -> Blocks:
        """Take the next cached blocks that have so many pages from their queues, oldest first; their nodes leave them."""
        taken: list[Blocks] = []
        gone = NO_BLOCKS
        for level, queue in self.queues.items():
            if num_pages > 0 and queue.num_cached:
                if level > 0 and self._choose is not None:
                    if taken:
                        # What goes already hangs off nothing any more.
                        gone, taken = np.concatenate([gone, self._forgotten(taken)]), []
                    self._choose(level, num_pages)
                parts, num, released = queue.take(num_pages, self._width)
                taken += parts
                num_pages -= num
                self.num_cached -= num
                self.num_evicted += num
                self.idle_steps += num * self._step - released
        blocks = self._forgotten(taken)
        return np.concatenate([gone, blocks]) if len(gone) else blocks

    def _forgotten(self, taken: list[Blocks]) -> Blocks:
        blocks = taken[0] if len(taken) == 1 else np.concatenate([NO_BLOCKS, *taken])
        if self.place is not None:
            # Held: what leaves with them may be content of each other.
            self.state[blocks] = _CONTENT + 1
        self._forget(taken, blocks)
        if self._is_raised:
            self.level[blocks] = 0
        return blocks

    def _num_pages(self, blocks: Blocks) -> int:
        return len(blocks) if self._width is None else int(self._width[blocks].sum())

    def pages_of(self, blocks: NDArray[Any], pages: int) -> NDArray[np.int32]:
        """int32 [..., pages]: the pages of blocks that take so many; -1 where there is no block (-1)."""
        if pages < 2:
            return blocks.astype(np.int32)[..., None][..., :pages]
        found: NDArray[np.int32] = self._pages[blocks, :pages]
        found[blocks < 0] = -1
        return found

    def all_pages_of(self, blocks: Blocks) -> Blocks:
        """All pages of these blocks, block by block, int64 [n]."""
        if self._width is None:
            return blocks
        widths = self._width[blocks]
        if len(blocks) and not np.count_nonzero(widths != widths[0]):
            # Those of one table: this costs half.
            return self._pages[blocks, : widths[0]].ravel().astype(np.int64)
        is_there = np.arange(self._pages.shape[1]) < widths[:, None]
        return self._pages[blocks][is_there].astype(np.int64)

    def of_pages(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """A column of blocks with each block's value on all of its pages."""
        if self._width is None:
            return column
        blocks, spread = self.state.nonzero()[0], np.zeros_like(column)
        spread[self.all_pages_of(blocks)] = column[blocks].repeat(self._width[blocks])
        return spread

    def _take_free(self, count: int) -> Blocks:
        top = self.num_free
        self.num_free = top - count
        return self._stack[top - count : top][::-1].copy()

    def hold(self, blocks: Blocks) -> None:
        """Add one reference to each of these distinct blocks, which are used or cached."""
        state = self.state[blocks]
        is_cached = state < 0
        num_cached = int(np.count_nonzero(is_cached))
        if num_cached:
            self.num_cached -= num_cached if self._width is None else self._num_pages(blocks[is_cached])
            # Their new state takes them out of their queues.
            state[is_cached] = _CONTENT
            if not self._is_raised:
                self.queues[0].num_cached -= num_cached
            else:
                for level, count in enumerate(np.bincount(self.level[blocks[is_cached]] - DOUBLED).tolist(), DOUBLED):
                    self.queues[level].num_cached -= count
        self.state[blocks] = state + 1

    def release(
        self,
        blocks: NDArray[Any],
        run: Run | None = None,
        num: int = 0,
        *,
        is_next: bool = False,
        repeats: bool = False,
    ) -> None:
        """Drop one reference of each of these distinct blocks, int32 or int64 [n], last one first: cached, it is evicted
        before those ahead of it. At 0 a block becomes cached if it has content, else free. With a `run` the first
        `num` of them, int64, which carry nothing yet, are its nodes from now on. Takes over an array of int64.
        `is_next`: what becomes cached is evicted before all that is. `repeats`: a block may be listed several times."""
        if run is not None:
            self._name(blocks[:num], run, DEVICE)
        elif len(blocks) == 1 and self.state.item(blocks.item()) == 1:
            # Most often a partial tail.
            self._put_free(blocks)
            return
        elif blocks.itemsize < 8:
            # As they stand in a table.
            blocks = blocks.astype(np.int64)
        held = self.state[blocks]
        if len(blocks) <= _PATTERN:
            looks = held.tobytes()
            if looks == _SOLE_PLAIN[: len(looks)]:
                if num < len(blocks):
                    self._put_free(blocks[num:])
                if num:
                    self._put_cached(blocks[:num], is_next)
                return
            if looks == _SOLE_WITH_CONTENT[: len(looks)]:
                self._put_cached(blocks, is_next)
                return
        if repeats and int((held & _REFERENCES).max()) > 1:
            places = np.sort(np.unique(blocks, return_index=True)[1])
            self.release(blocks[places], is_next=is_next)
            self.release(np.delete(blocks, places), is_next=is_next, repeats=True)
            return
        held[:num] |= _CONTENT
        held -= 1
        self.state[blocks] = held
        is_free = held & _REFERENCES == 0
        if not np.count_nonzero(is_free):
            # A prefix that many share: all blocks have other holders.
            return
        has_content = held >= _CONTENT
        free, cached = blocks[is_free & ~has_content], blocks[is_free & has_content]
        if len(free):
            self._put_free(free)
        if len(cached):
            self._put_cached(cached, is_next)

    def _put_free(self, blocks: Blocks) -> None:
        """Add blocks that carry nothing from now on, last one first: the first is drawn next."""
        self.state[blocks] = 0
        if self._width is not None:
            blocks = self.all_pages_of(blocks)
        top = self.num_free
        self.num_free = top + len(blocks)
        self._stack[top : self.num_free] = blocks[::-1]

    def _put_cached(self, blocks: Blocks, is_next: bool) -> None:
        """Add blocks with content, last one first, at their levels."""
        self.num_cached += len(blocks) if self._width is None else self._num_pages(blocks)
        if self.goes_next is not None:
            self.goes_next[blocks] = is_next
        if not self._is_raised:
            self.queues[0].put(blocks, self._step, is_next)
            return
        levels = self.level[blocks]
        for level in np.unique(levels).tolist():
            self.queues[level].put(blocks[levels == level], self._step, is_next)

    def set_levels(self, blocks: Blocks, levels: NDArray[np.int8]) -> None:
        """Set levels of distinct blocks with content. Cached ones become newest of theirs, last one evicted first."""
        cached = blocks[self.state[blocks] < 0]
        self.hold(cached)
        self.level[blocks], self._is_raised = levels, True
        self.release(cached)

    def put_first(self, blocks: Blocks) -> None:
        """Let these cached blocks, last one first, be the next of their levels to be evicted, the first one first."""
        self.hold(blocks)
        self.release(blocks[::-1].copy(), is_next=True)
        if self.goes_next is not None:
            # On another tier it can be of use.
            self.goes_next[blocks] = False

    def keep(self, blocks: Blocks) -> None:
        """`hold` beyond the tables, counted for the checker."""
        self.hold(blocks)
        self.kept.update(blocks.tolist())

    def let_go(self, blocks: Blocks) -> None:
        """Release what `keep` held."""
        self.kept -= Counter(blocks.tolist())
        self.release(blocks)

    def carry(self, blocks: Blocks, run: Run, place: int = DEVICE) -> None:
        """Mark these used blocks as carrying nodes of `run` in a place."""
        self.state[blocks] |= _CONTENT
        self._name(blocks, run, place)

    def _name(self, blocks: Blocks, run: Run, place: int) -> None:
        self.run[blocks] = run
        if self.place is not None:
            self.place[blocks] = place

    def forget_content(self, blocks: Blocks) -> None:
        """Take the nodes from these distinct blocks, used or cached; cached ones become free."""
        if not len(blocks):
            return
        self.hold(blocks)
        self.state[blocks] &= _REFERENCES
        self.level[blocks] = 0
        self.run[blocks] = None
        self.release(blocks.copy())

    def forget_all(self) -> None:
        """Take the nodes from all blocks; none may be used."""
        taken = [part for queue in self.queues.values() for part in queue.take(self.num_blocks, self._width)[0]]
        cached, self.num_cached = np.concatenate([NO_BLOCKS, *taken]), 0
        self._put_free(cached[::-1])
        self.run[:] = None
        self.level[:], self._is_raised = 0, False

    def free_blocks(self) -> Blocks:
        """The free blocks in the order in which they are drawn, int64 [num_free]; a copy."""
        return self._stack[: self.num_free][::-1].copy()


class CachedQueue:
    """Cached blocks of one level, least recently used first.

    A queue of *segments*, one a release: a release of any length is one append and one scatter. A prefix hit takes
    blocks out of the middle by changing their state, in O(its blocks). Stale entries are skipped when their turn comes,
    and swept at twice the rate at which releases add entries: they never outgrow the live ones by much, and no release
    compacts the whole queue.

        | swept segments | segments not swept yet | <- releases append here
          ^ takes come from here
    """

    def __init__(self, pool: Pool, numbers: Iterator[int]) -> None:
        # The state of a cached block is minus the number of its segment.
        self._pool = pool
        # Counts the segments of all queues of a pool.
        self._numbers = numbers
        self.num_cached = 0
        self._swept: deque[Segment] = deque()
        self._segments: deque[Segment] = deque()
        self._num_entries = 0

    def put(self, blocks: Blocks, step: int, is_next: bool = False) -> None:
        """Append blocks, the last one evicted first; `is_next`: in front. Keeps the array."""
        number, count = next(self._numbers), len(blocks)
        self._pool.state[blocks] = -number
        segment = number, blocks[::-1], step
        if is_next:
            self._swept.appendleft(segment)
        else:
            self._segments.append(segment)
        self.num_cached += count
        self._num_entries += count
        if self._num_entries > 2 * self.num_cached + 64:
            self._sweep(2 * count)

    def take(self, wanted: int, width: NDArray[np.int16] | None) -> tuple[list[Blocks], int, int]:
        """Remove the first blocks that have `wanted` pages, or all, one part a segment. Return them, their pages, and the
        sum over these of the steps that released them. `width`: pages of each block; None: one."""
        taken: list[Blocks] = []
        left, released = wanted, 0
        while left > 0 and self.num_cached:
            if not self._swept:
                self._swept, self._segments = self._segments, self._swept
            number, blocks, when = self._swept.popleft()
            live = self._live(number, blocks)
            self._num_entries -= len(blocks)
            num = len(live)
            fits = left if width is None else int(width[live].cumsum().searchsorted(left)) + 1
            if num > fits:
                self._swept.appendleft((number, live[fits:], when))
                self._num_entries += num - fits
                live, num = live[:fits], fits
            if num:
                taken.append(live)
                self.num_cached -= num
                pages = num if width is None else int(width[live].sum())
                left -= pages
                released += pages * when
        return taken, wanted - left, released

    def blocks(self) -> Blocks:
        """The blocks in eviction order, int64 [num_cached]; a copy."""
        segments = [*self._swept, *self._segments]
        return np.concatenate([NO_BLOCKS, *(self._live(number, blocks) for number, blocks, _ in segments)])

    @property
    def is_counted(self) -> bool:
        """Whether there are as many entries as it counts, those of blocks that have left included."""
        return self._num_entries == sum(len(blocks) for _, blocks, _ in (*self._swept, *self._segments))

    def _live(self, number: int, blocks: Blocks) -> Blocks:
        """The blocks of a segment that have not left."""
        if self._num_entries == self.num_cached:
            return blocks
        is_live = self._pool.state[blocks] == -number
        return blocks if is_live.all() else blocks[is_live]

    def _sweep(self, work: int) -> None:
        """Check about `work` entries that this round has not checked, and drop the stale ones."""
        while work > 0 and self._num_entries > self.num_cached:
            if not self._segments:
                # All entries are checked: begin a new round.
                self._swept, self._segments = self._segments, self._swept
            number, blocks, when = self._segments.popleft()
            live = self._live(number, blocks)
            self._num_entries += len(live) - len(blocks)
            work -= len(blocks)
            if len(live):
                self._swept.append((number, live, when))


class Retentions:
    """Content that is evicted later than the rest, for good or until a logical time. A retention raises the level, 0 to 3, of
    a node and of all before it, for no child is kept longer than its parent, and of the windows and states that a row behind
    it begins with. If the `host_gives_way`, a host block is at the
    lowest level while the device has its node, too, and back at the node's own when the device lets go of it."""

    def __init__(self, pools: Sequence[Pool], *, host_gives_way: bool) -> None:
        self._pools, self.host_gives_way = pools, host_gives_way
        self.now, self._numbers = -np.inf, itertools.count(1)
        # Of the retentions that end: a heap of when, and their number; and by number, their runs, last one first. What has
        # ended before stays in the heap until half of it has.
        self._ends: list[tuple[float, int]] = []
        self._runs: dict[int, list[Run]] = {}
        # The first logical time at which a retention ends; every step reads it.
        self.next_end = np.inf

    def retain(self, reaches: dict[Run, list[Reach]], level: int, until: float | None) -> Retained:
        """Keep these nodes, of runs last one first, at `level` or higher until then (None: for good). Raises InvalidConfig."""
        number, runs = next(self._numbers), list(reaches)
        if until is not None:
            until = logical_time("until", until)
            if not self.now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self.now}; got {until!r}.")
            if len(self._ends) > 2 * len(self._runs) + 64:
                self._ends = [end for end in self._ends if end[1] in self._runs]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (until, number))
            self._runs[number], self.next_end = runs, self._ends[0][0]
        # Last run first: children become old, and are evicted, before parents.
        for run, its in reaches.items():
            run.retain(number, its, level)
            self.apply_to(run, renewed=run.retained[number])
        return number, runs

    def end(self, retained: Retained) -> None:
        """End a retention, if it has not ended."""
        number, runs = retained
        self._runs.pop(number, None)
        for run in runs:
            if run.end_retention(number):
                self.apply_to(run)

    def cut(self, run: Run, first: int) -> None:
        """End what retains nodes of a run from `first` on; what is before them stays retained."""
        for number, (reaches, level) in list(run.retained.items()):
            run.end_retention(number)
            if stay := [(group, begin, min(stop, first)) for group, begin, stop in reaches if begin < first]:
                run.retain(number, stay, level)
        self.apply_to(run)

    def expire(self, now: float) -> None:
        """End the retentions until the logical time `now`, or before. An earlier time than before changes nothing."""
        self.now = max(self.now, now)
        while self._ends and self._ends[0][0] <= self.now:
            _, number = heapq.heappop(self._ends)
            self.end((number, self._runs.get(number, [])))
        self.next_end = self._ends[0][0] if self._ends else np.inf

    def clear(self) -> None:
        self._ends.clear()
        self._runs.clear()
        self.next_end = np.inf

    def levels_of(self, place: int, run: Run, offsets: Blocks) -> NDArray[np.int8]:
        """int8 [n]: the level of each node's block in a place."""
        levels = run.levels_of(place // NUM_PLACES, offsets)
        if self.host_gives_way and place % NUM_PLACES == HOST and len(offsets):
            is_here = run.blocks_in(place - HOST, 0, offsets.item(-1) + 1)[offsets] >= 0
            # Of an open run the device has the full blocks, in its row's table.
            levels[is_here | (place == HOST and run.row >= 0)] = DOUBLED
        return levels

    def apply_to(self, run: Run, renewed: tuple[list[Reach], int] = ([], 0)) -> None:
        """Set levels of the run's blocks as its retentions say; those of an open run on the device wait until it
        closes. `renewed`, nodes and a level: blocks of these at this level become newest, so that no child outlives
        its parent. Windows and states are older than the full blocks that they are of no use without."""
        for place, (pool, there) in reversed(list(enumerate(zip(self._pools, run.blocks, strict=True)))):
            offsets = (there >= 0).nonzero()[0]
            blocks, levels = there[offsets], self.levels_of(place, run, offsets)
            changed = levels != pool.level[blocks]
            for group, first, stop in renewed[0]:
                if group == place // NUM_PLACES:
                    changed |= (offsets >= first) & (offsets < stop) & (levels == renewed[1])
            if changed.any():
                pool.set_levels(blocks[changed], levels[changed])
