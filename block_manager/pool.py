"""All blocks of one tier: their references, the content that each carries, and the order in which they are drawn.

Block ids are int64 here and wherever they index a column: numpy gathers by int32 five times slower.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged.base.arguments import logical_time
from paged.errors import InvalidConfig, OutOfBlocks

from .runs import DEVICE, HOST, NO_BLOCKS, NUM_PLACES, Blocks, Reach, Run

# A segment's number, its blocks, of which the last is evicted first, and the step that released them.
Segment = tuple[int, Blocks, int]

# The high bit in the state of a used block that carries a node.
_CONTENT = 1 << 40
_REFERENCES = _CONTENT - 1
# States of blocks that have one holder, as bytes. To compare bytes costs a tenth of a numpy reduction.
_PATTERN = 1024
_SOLE_WITH_CONTENT = np.full(_PATTERN, _CONTENT + 1, np.int64).tobytes()
_SOLE_PLAIN = np.full(_PATTERN, 1, np.int64).tobytes()
# Levels in the order of eviction: host blocks whose content the device has, too; content that is not retained; 1 to 3.
DOUBLED = -1
_LEVELS = (DOUBLED, 0, 1, 2, 3)
# A retention's number, and the runs that it covers, last one first.
Retained = tuple[int, list[Run]]
_Number = TypeVar("_Number", bound=np.integer)


class Pool:
    """`num_pages` pages of one tier, and the blocks that they make. What a pool counts are pages.

    A *block* takes one page, or up to `most_pages`. It is *used* (ref count ≥ 1) or *cached* (0, with content). Its
    first page names it: arrays `blocks`, int64, are numbers of first pages. A page of no block is *free*.

    Free pages are drawn first. They are a stack: the last one released is still warm, and never-used ones lie at the
    bottom in rising order. Cached blocks have a queue for each level; the lowest level is evicted first.

    `state` int64 [num_pages] is 0 if the page names no block; minus the number of its segment in a queue if the block
    is cached; its ref count if it is used, with a high bit if it carries a node. So a release is one read and one
    write. `run` object [num_pages] is the run of the block's node. A pool that `grows` never lacks pages.
    """

    def __init__(self, num_pages: int, tier: str, most_pages: int = 1, *, grows: bool = False) -> None:
        self.num_pages, self.tier, self._grows = num_pages, tier, grows
        self.state = np.zeros(num_pages, np.int64)
        self.run: NDArray[np.object_] = np.empty(num_pages, object)
        # By block, if the pool serves several places: that of its node, and whether it was put first in a queue.
        self.place: NDArray[np.int8] | None = None
        self.goes_next: NDArray[np.bool_] | None = None
        # By block: higher levels are evicted later. And whether one was ever raised.
        self.level, self._is_raised = np.zeros(num_pages, np.int8), False
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        numbers = itertools.count(1)
        self.queues = {level: CachedQueue(self, numbers) for level in _LEVELS}
        # Free pages, and pages of cached blocks.
        self.num_free, self.num_cached = num_pages, 0
        self._step = 0
        # Pages evicted so far, and the sum of the steps that each was unused.
        self.num_evicted = self.idle_steps = 0
        # References that no table has, by block: see `keep`.
        self.kept: Counter[int] = Counter()
        self._forget: Callable[[list[Blocks], Blocks], None] = lambda taken, blocks: None
        self._choose: Callable[[int, int], None] | None = None
        # By block, int16: how many pages it has (None: one); and which, int32 [num_pages, most_pages].
        self.width: NDArray[np.int16] | None = None
        if most_pages > 1:
            self.width = np.ones(num_pages, np.int16)
            self._pages = np.zeros((num_pages, most_pages), np.int32)

    @property
    def num_available(self) -> int:
        """Pages that can be drawn: free ones, and those of cached blocks."""
        return self.num_free + self.num_cached

    def num_available_to(self, level: int) -> int:
        """Pages that can be drawn while all content of a higher level than this stays."""
        stay = [queue for each, queue in self.queues.items() if each > level and queue.num_blocks]
        pages = [each.num_blocks if self.width is None else self.pages_in(each.blocks()) for each in stay]
        return self.num_available - sum(pages)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def begin_step(self, number: int) -> None:
        """Begin the step `number`: blocks that are released from now on count as unused from here."""
        self._step = number

    def on_eviction(self, forget: Callable[[list[Blocks], Blocks], None], *, has_places: bool = False) -> None:
        """Call `forget` with evicted blocks, oldest first, in parts and as one array: they carry nothing from then on.
        `has_places`: the pool serves several places; the blocks of one release lie in one place."""
        self._forget = forget
        if has_places:
            self.place, self.goes_next = np.zeros(self.num_pages, np.int8), np.zeros(self.num_pages, np.bool_)

    def on_raised(self, choose: Callable[[int, int], None]) -> None:
        """Call `choose` with a level and a number of pages before so many of that raised level are evicted. It may put
        others of this level first."""
        self._choose = choose

    def refs(self, blocks: Blocks | NDArray[np.int32] | slice | int = slice(None)) -> Any:
        """References to each of these blocks, int32 or int32 [n] (default: to all); a copy."""
        return (np.maximum(self.state[blocks], 0) & _REFERENCES).astype(np.int32)

    def has_content(self, blocks: Blocks | slice | int) -> Any:
        """Whether each of these blocks carries a node, used or not: bool, or bool [n]."""
        state = self.state[blocks]
        return (state < 0) | (state >= _CONTENT)

    def require(self, num_pages: int) -> None:
        """Raise OutOfBlocks if fewer pages are available. A pool that grows at least doubles instead."""
        if num_pages <= self.num_available:
            return
        if not self._grows:
            raise OutOfBlocks(num_pages, self.num_available, self.tier)
        have, more = self.num_pages, max(self.num_pages, num_pages)
        self.state = np.concatenate([self.state, np.zeros(more, np.int64)])
        self.run = np.concatenate([self.run, np.empty(more, object)])
        self.level = np.concatenate([self.level, np.zeros(more, np.int8)])
        self._stack = np.concatenate([np.arange(have + more - 1, have - 1, -1), self._stack])
        self.num_pages += more
        self.num_free += more

    def draw(self, num_blocks: int, pages: int = 1) -> Blocks:
        """Draw blocks of `pages` pages, one reference each, int64 [num_blocks]; may evict. Raises OutOfBlocks."""
        num_pages = num_blocks * pages
        if num_pages > self.num_free:
            self.require(num_pages)
        num_free = self.num_free
        if num_pages > num_free and self.width is None:
            free = self._take_free(num_free)
            blocks = self._evicted(num_pages - num_free)
            blocks = np.concatenate([free, blocks]) if num_free else blocks
        else:
            self.make_room(num_pages)
            blocks = self._take_free(num_pages)
        if self.width is not None:
            drawn = blocks.reshape(num_blocks, pages)
            blocks = drawn[:, 0].copy()
            self.width[blocks] = pages
            self._pages[blocks, :pages] = drawn
        self.state[blocks] = 1
        return blocks

    def make_room(self, num_pages: int) -> None:
        """Evict until `num_pages`, which are available, are free. One call serves several draws."""
        while (missing := num_pages - self.num_free) > 0:
            self._put_free(self._evicted(missing))

    def _evicted(self, num_pages: int) -> Blocks:
        """Take the next cached blocks with `num_pages` pages from their queues, oldest first. They lose their nodes."""
        taken: list[Blocks] = []
        gone = NO_BLOCKS
        for level, queue in self.queues.items():
            if num_pages > 0 and queue.num_blocks:
                if level > 0 and self._choose is not None:
                    if taken:
                        # Forget what is taken so far: `choose` must see that nothing hangs off its parents any more.
                        gone, taken = np.concatenate([gone, self._forgotten(taken)]), []
                    self._choose(level, num_pages)
                parts, num, released = queue.take(num_pages)
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
            # Used for now: to forget one may take the content of another, and must not free it.
            self.state[blocks] = _CONTENT + 1
        self._forget(taken, blocks)
        if self._is_raised:
            self.level[blocks] = 0
        return blocks

    def pages_in(self, blocks: Blocks) -> int:
        return len(blocks) if self.width is None else int(self.width[blocks].sum())

    def pages_of(self, blocks: NDArray[Any], pages: int) -> NDArray[np.int32]:
        """The pages of blocks that take `pages` each, int32 [..., pages]; -1 for the block -1, which is none."""
        if pages < 2:
            return blocks.astype(np.int32)[..., None][..., :pages]
        found: NDArray[np.int32] = self._pages[blocks, :pages]
        found[blocks < 0] = -1
        return found

    def all_pages_of(self, blocks: Blocks) -> Blocks:
        """All pages of these blocks, one block after the other, int64 [n]."""
        if self.width is None:
            return blocks
        widths = self.width[blocks]
        if len(blocks) and not np.count_nonzero(widths != widths[0]):
            # Blocks of one table, which costs half.
            return self._pages[blocks, : widths[0]].ravel().astype(np.int64)
        is_there = np.arange(self._pages.shape[1]) < widths[:, None]
        return self._pages[blocks][is_there].astype(np.int64)

    def by_page(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """Spread a column of blocks over pages: each block's value on all of its pages."""
        if self.width is None:
            return column
        blocks, spread = self.state.nonzero()[0], np.zeros_like(column)
        spread[self.all_pages_of(blocks)] = column[blocks].repeat(self.width[blocks])
        return spread

    def _take_free(self, num_pages: int) -> Blocks:
        top = self.num_free
        self.num_free = top - num_pages
        return self._stack[top - num_pages : top][::-1].copy()

    def hold(self, blocks: Blocks) -> None:
        """Add a reference to each of these distinct blocks, which are used or cached."""
        state = self.state[blocks]
        is_cached = state < 0
        num_cached = int(np.count_nonzero(is_cached))
        if num_cached:
            self.num_cached -= num_cached if self.width is None else self.pages_in(blocks[is_cached])
            # The new state makes their entries in the queues stale.
            state[is_cached] = _CONTENT
            if not self._is_raised:
                self.queues[0].num_blocks -= num_cached
            else:
                for level, count in enumerate(np.bincount(self.level[blocks[is_cached]] - DOUBLED).tolist(), DOUBLED):
                    self.queues[level].num_blocks -= count
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
        """Drop a reference of each of these distinct blocks, int32 or int64 [n]. Without references a block is cached
        if it has content, else free; cached blocks are evicted last one first. `run`: the first `num` of `blocks`,
        int64, which carry nothing yet, become nodes of it. `is_next`: what becomes cached is evicted before all that is
        cached. `repeats`: a block may be listed several times. An array of int64 belongs to the pool from now on."""
        if run is not None:
            self._name(blocks[:num], run, DEVICE)
        elif len(blocks) == 1 and self.state.item(blocks.item()) == 1:
            # Most often the partial block of a row.
            self._put_free(blocks)
            return
        elif blocks.itemsize < 8:
            # Blocks from a table.
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
            # All have other holders, like a prefix that many rows share.
            return
        has_content = held >= _CONTENT
        free, cached = blocks[is_free & ~has_content], blocks[is_free & has_content]
        if len(free):
            self._put_free(free)
        if len(cached):
            self._put_cached(cached, is_next)

    def _put_free(self, blocks: Blocks) -> None:
        """Free the pages of blocks, which carry nothing from now on. The first of them is drawn next."""
        self.state[blocks] = 0
        pages, top = self.all_pages_of(blocks), self.num_free
        self.num_free = top + len(pages)
        self._stack[top : self.num_free] = pages[::-1]

    def _put_cached(self, blocks: Blocks, is_next: bool) -> None:
        """Add blocks with content to the queues of their levels. The last of them is evicted first."""
        self.num_cached += self.pages_in(blocks)
        if self.goes_next is not None:
            self.goes_next[blocks] = is_next
        if not self._is_raised:
            self.queues[0].put(blocks, self._step, is_next)
            return
        levels = self.level[blocks]
        for level in np.unique(levels).tolist():
            self.queues[level].put(blocks[levels == level], self._step, is_next)

    def set_levels(self, blocks: Blocks, levels: NDArray[np.int8]) -> None:
        """Set levels of distinct blocks with content. Cached ones become the newest there, evicted last one first."""
        cached = blocks[self.state[blocks] < 0]
        self.hold(cached)
        self.level[blocks], self._is_raised = levels, True
        self.release(cached)

    def put_first(self, blocks: Blocks) -> None:
        """Let these cached blocks be evicted next of their levels, the first one first."""
        self.hold(blocks)
        self.release(blocks[::-1].copy(), is_next=True)
        if self.goes_next is not None:
            # `goes_next` is for content of no more use; this may be of use on the host.
            self.goes_next[blocks] = False

    def keep(self, blocks: Blocks) -> None:
        """`hold` blocks for a holder that is no table: `kept` counts these references for the checker."""
        self.hold(blocks)
        self.kept.update(blocks.tolist())

    def let_go(self, blocks: Blocks) -> None:
        """Release what `keep` held."""
        self.kept -= Counter(blocks.tolist())
        self.release(blocks)

    def carry(self, blocks: Blocks, run: Run, place: int = DEVICE) -> None:
        """Mark these used blocks: each carries a node of `run` in a place."""
        self.state[blocks] |= _CONTENT
        self._name(blocks, run, place)

    def _name(self, blocks: Blocks, run: Run, place: int) -> None:
        self.run[blocks] = run
        if self.place is not None:
            self.place[blocks] = place

    def forget_content(self, blocks: Blocks) -> None:
        """Take the nodes from these distinct blocks, used or cached. Cached ones become free."""
        if not len(blocks):
            return
        self.hold(blocks)
        self.state[blocks] &= _REFERENCES
        self.level[blocks] = 0
        self.run[blocks] = None
        self.release(blocks.copy())

    def forget_all(self) -> None:
        """Take the nodes from all blocks. None may be used."""
        self.forget_content(np.concatenate([queue.blocks() for queue in self.queues.values()])[::-1])
        self._is_raised = False

    def free_pages(self) -> Blocks:
        """The free pages in the order in which they are drawn, int64 [num_free]; a copy."""
        return self._stack[: self.num_free][::-1].copy()


class CachedQueue:
    """Cached blocks of one level, least recently used first.

    A queue of *segments*, one for each release: a release of any length is one append and one scatter. A prefix hit
    takes blocks out of the middle by changing their state, in O(its blocks); their entries become stale. A take skips
    stale entries. A sweep drops them at twice the rate at which releases add entries, so they never outgrow the live
    ones by much, and no release compacts the whole queue.

        | swept segments | segments not swept yet | <- releases append here
          ^ takes come from here
    """

    def __init__(self, pool: Pool, numbers: Iterator[int]) -> None:
        # The state of a cached block is minus the number of its segment.
        self._pool = pool
        # Counts the segments of all queues of the pool.
        self._numbers = numbers
        self.num_blocks = 0
        self._swept: deque[Segment] = deque()
        self._segments: deque[Segment] = deque()
        self._num_entries = 0

    def put(self, blocks: Blocks, step: int, is_next: bool = False) -> None:
        """Append blocks, evicted last one first; `is_next`: put them in front. The queue keeps the array."""
        number, count = next(self._numbers), len(blocks)
        self._pool.state[blocks] = -number
        segment = number, blocks, step
        if is_next:
            self._swept.appendleft(segment)
        else:
            self._segments.append(segment)
        self.num_blocks += count
        self._num_entries += count
        if self._num_entries > 2 * self.num_blocks + 64:
            self._sweep(2 * count)

    def take(self, num_pages: int) -> tuple[list[Blocks], int, int]:
        """Remove the first blocks that have `num_pages` pages, or all. Returns them, a part for each segment; their
        pages; and, over these, the sum of the steps that released them."""
        taken: list[Blocks] = []
        width, left, released = self._pool.width, num_pages, 0
        while left > 0 and self.num_blocks:
            if not self._swept:
                self._swept, self._segments = self._segments, self._swept
            number, blocks, when = self._swept.popleft()
            live = self._live(number, blocks)
            self._num_entries -= len(blocks)
            num = len(live)
            fits = left if width is None else int(width[live[::-1]].cumsum().searchsorted(left)) + 1
            if num > fits:
                self._swept.appendleft((number, live[: num - fits], when))
                self._num_entries += num - fits
                live, num = live[num - fits :], fits
            if num:
                taken.append(live[::-1])
                self.num_blocks -= num
                pages = num if width is None else int(width[live].sum())
                left -= pages
                released += pages * when
        return taken, num_pages - left, released

    def blocks(self) -> Blocks:
        """The blocks in eviction order, int64 [num_blocks]; a copy."""
        parts = [self._live(*each[:2])[::-1] for segments in (self._swept, self._segments) for each in segments]
        return np.concatenate(parts) if parts else NO_BLOCKS.copy()

    @property
    def is_counted(self) -> bool:
        """Whether `_num_entries` is the number of entries, stale ones included."""
        return self._num_entries == sum(len(blocks) for _, blocks, _ in (*self._swept, *self._segments))

    def _live(self, number: int, blocks: Blocks) -> Blocks:
        """The blocks of a segment whose entries are not stale."""
        if self._num_entries == self.num_blocks:
            return blocks
        is_live = self._pool.state[blocks] == -number
        return blocks if is_live.all() else blocks[is_live]

    def _sweep(self, work: int) -> None:
        """Check about `work` entries that this round has not checked, and drop the stale ones."""
        while work > 0 and self._num_entries > self.num_blocks:
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
    """Content that is evicted later than the rest, for good or until a logical time. A retention raises the level, 0 to
    3, of a node and of all before it, because no child is kept longer than its parent; and of the windows and states
    with which a row behind it begins. With `host_gives_way` a host block has the lowest level while the device has its
    node, too, and gets the node's own level back when the device loses it."""

    def __init__(self, pools: Sequence[Pool], *, host_gives_way: bool) -> None:
        self._pools, self.host_gives_way = pools, host_gives_way
        self.now, self._numbers = -np.inf, itertools.count(1)
        # Of retentions that end: (time, number), rising; and by number, the time and the runs, last one first.
        self._ends: list[tuple[float, int]] = []
        self._of_number: dict[int, tuple[float, list[Run]]] = {}
        # The earliest time at which one ends. Every step reads it.
        self.next_end = np.inf

    def retain(self, reaches: dict[Run, list[Reach]], level: int, until: float | None) -> Retained:
        """Retain nodes, by run, last one first, at `level` at least (`until` None: for good). Raises InvalidConfig."""
        number, runs = next(self._numbers), list(reaches)
        if until is not None:
            until = logical_time("until", until)
            if not self.now < until < np.inf:
                raise InvalidConfig(f"until has to be a logical time after {self.now}; got {until!r}.")
            insort(self._ends, (until, number))
            self._of_number[number], self.next_end = (until, runs), self._ends[0][0]
        # Last run first: children become older than their parents, and are evicted before them.
        for run, of_run in reaches.items():
            run.retain(number, of_run, level)
            self.apply_to(run, renewed=run.retained[number])
        return number, runs

    def end(self, retained: Retained) -> None:
        """End a retention, unless it has ended."""
        number, runs = retained
        if number in self._of_number:
            until, _ = self._of_number.pop(number)
            del self._ends[bisect_left(self._ends, (until, number))]
            self.next_end = self._ends[0][0] if self._ends else np.inf
        for run in runs:
            if run.end_retention(number):
                self.apply_to(run)

    def cut(self, run: Run, first: int) -> None:
        """End what retains the run's nodes from `first` on. Nodes before them stay retained."""
        for number, (reaches, level) in list(run.retained.items()):
            run.end_retention(number)
            if stay := [(group, begin, min(stop, first)) for group, begin, stop in reaches if begin < first]:
                run.retain(number, stay, level)
        self.apply_to(run)

    def expire(self, now: float) -> None:
        """End the retentions whose time is `now` or earlier. A `now` before an earlier call's changes nothing."""
        self.now = max(self.now, now)
        while self._ends and self.next_end <= self.now:
            _, number = self._ends[0]
            self.end((number, self._of_number[number][1]))

    def clear(self) -> None:
        self._ends.clear()
        self._of_number.clear()
        self.next_end = np.inf

    def levels_of(self, place: int, run: Run, offsets: Blocks) -> NDArray[np.int8]:
        """The level of each node's block in a place, int8 [n]."""
        levels = run.levels_of(place // NUM_PLACES, offsets)
        if self.host_gives_way and place % NUM_PLACES == HOST and len(offsets):
            is_here = run.blocks_in(place - HOST, 0, offsets.item(-1) + 1)[offsets] >= 0
            # The device has all full blocks of an open run, in its row's table.
            levels[is_here | (place == HOST and run.row >= 0)] = DOUBLED
        return levels

    def apply_to(self, run: Run, renewed: tuple[list[Reach], int] = ([], 0)) -> None:
        """Set levels of the run's blocks by its retentions; device blocks of an open run follow when it closes.
        `renewed`: nodes and a level; their blocks at this level become newest, so that no child outlives its parent.
        Windows and states become older than full blocks, without which they are of no use."""
        for place, (pool, there) in reversed(list(enumerate(zip(self._pools, run.blocks, strict=True)))):
            offsets = (there >= 0).nonzero()[0]
            blocks, levels = there[offsets], self.levels_of(place, run, offsets)
            changed = levels != pool.level[blocks]
            for group, first, stop in renewed[0]:
                if group == place // NUM_PLACES:
                    changed |= (offsets >= first) & (offsets < stop) & (levels == renewed[1])
            if changed.any():
                pool.set_levels(blocks[changed], levels[changed])
