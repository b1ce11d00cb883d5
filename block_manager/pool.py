"""All blocks of one tier: their references, which of them are free, and whose content each one carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paged.errors import OutOfBlocks

from .free_list import FreeList, Taken
from .runs import Blocks, Run

# The bit of a used block's state that marks a node in it.
_CONTENT = 1 << 40
_REFERENCES = _CONTENT - 1
# States of blocks with one holder, as bytes: comparing bytes costs a tenth of a numpy reduction.
_PATTERN = 1024
_SOLE_WITH_CONTENT = np.full(_PATTERN, _CONTENT + 1, np.int64).tobytes()
_SOLE_PLAIN = np.full(_PATTERN, 1, np.int64).tobytes()


class Pool:
    """`num_blocks` blocks, each *used* (ref count ≥ 1), *cached* (0, with content) or *free* (0, without).

    `state` int64 [num_blocks] is 0 if free, minus its segment in the free list if cached, the ref count if used (plus
    one high bit with a node): a release is one read and one write. `run` object [num_blocks] is the run of its node.
    """

    def __init__(self, num_blocks: int, tier: str) -> None:
        self.num_blocks = num_blocks
        self.tier = tier
        self.state = np.zeros(num_blocks, np.int64)
        self.run: NDArray[np.object_] = np.empty(num_blocks, object)
        # int8 [num_blocks], higher levels are evicted later; None until any is raised.
        self.level: NDArray[np.int8] | None = None
        self.free_list = FreeList(self.state)
        # Blocks evicted so far, and the sum of the steps that each was unused.
        self.num_evicted = self.idle_steps = 0
        # References beyond the tables, by block: of loads that have not ended.
        self.kept: Counter[int] = Counter()
        # Called with evicted blocks, oldest first, in parts and as one array: their nodes lose this residence.
        self.forget: Callable[[list[Taken], Blocks], None] | None = None

    @property
    def num_free(self) -> int:
        return self.free_list.num_plain

    @property
    def num_cached(self) -> int:
        return self.free_list.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be drawn: free and cached ones."""
        return self.free_list.num_plain + self.free_list.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def ref_count(self) -> NDArray[np.int32]:
        """int32 [num_blocks]: references to each block; a copy."""
        return self.refs(slice(None))

    def refs(self, blocks: Blocks | NDArray[np.int32] | slice) -> NDArray[np.int32]:
        return (np.maximum(self.state[blocks], 0) & _REFERENCES).astype(np.int32)

    def num_refs(self, block: int) -> int:
        return max(int(self.state[block]), 0) & _REFERENCES

    def is_content(self, block: int) -> bool:
        """Whether a used block carries a node."""
        return bool(self.state[block] >= _CONTENT)

    def has_content(self, blocks: Blocks | slice) -> NDArray[np.bool_]:
        """bool [n]: whether each of these blocks, used or not, carries a node."""
        state = self.state[blocks]
        return (state < 0) | (state >= _CONTENT)

    def require(self, count: int) -> None:
        """Raise OutOfBlocks when fewer than `count` blocks can be drawn."""
        if count > self.num_available:
            raise OutOfBlocks(count, self.num_available, self.tier)

    def draw(self, count: int, *, for_nodes: bool = False) -> Blocks:
        """Draw `count` blocks, ref count 1 each, int64 [count]; evict where free ones do not suffice. With `for_nodes`
        they carry nodes, and the caller sets `run`. Raises OutOfBlocks, changing nothing."""
        free_list = self.free_list
        num_plain = free_list.num_plain
        if count <= num_plain:
            blocks = free_list.take_plain(count)
        else:
            self.require(count)
            self.num_evicted += count - num_plain
            parts = [free_list.take_plain(num_plain)] if num_plain else []
            taken = free_list.take_cached(count - num_plain)
            for evicted, _, when in taken:
                self.idle_steps += len(evicted) * (free_list.now - when)
                parts.append(evicted)
            blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if self.forget is not None:
                self.forget(taken, blocks[num_plain:])
            if self.level is not None:
                self.level[blocks] = 0
        self.state[blocks] = _CONTENT + 1 if for_nodes else 1
        return blocks

    def hold(self, blocks: Blocks) -> None:
        """Add one reference to each of these distinct blocks, which are used or cached."""
        state = self.state[blocks]
        is_cached = state < 0
        num_cached = int(np.count_nonzero(is_cached))
        if num_cached:
            if self.level is None:
                self.free_list.take_out(num_cached)
            else:
                for level, count in enumerate(np.bincount(self.level[blocks[is_cached]]).tolist()):
                    if count:
                        self.free_list.take_out(count, level)
            state[is_cached] = _CONTENT
        self.state[blocks] = state + 1

    def release(self, blocks: Blocks) -> None:
        """Drop one reference of each of these distinct blocks, in the order in which they are to be reused. At 0 a
        block becomes cached if it has content, else free. Takes over the array."""
        held = self.state[blocks]
        looks = held.tobytes()
        if len(blocks) <= _PATTERN:
            if looks == _SOLE_WITH_CONTENT[: len(looks)]:
                if len(blocks):
                    self._put_cached(blocks)
                return
            if looks == _SOLE_PLAIN[: len(looks)]:
                self.state[blocks] = 0
                self.free_list.put_plain(blocks)
                return
        held -= 1
        self.state[blocks] = held
        is_free = held & _REFERENCES == 0
        if not np.count_nonzero(is_free):
            # A prefix that many share: all blocks have other holders.
            return
        has_content = held >= _CONTENT
        plain, cached = blocks[is_free & ~has_content], blocks[is_free & has_content]
        if len(plain):
            self.free_list.put_plain(plain)
        if len(cached):
            self._put_cached(cached)

    def _put_cached(self, blocks: Blocks) -> None:
        if self.level is None:
            self.free_list.put_cached(blocks)
            return
        levels = self.level[blocks]
        for level in np.unique(levels).tolist():
            self.free_list.put_cached(blocks[levels == level], level=level)

    def set_levels(self, blocks: Blocks, levels: NDArray[np.int8]) -> None:
        """Set levels of distinct blocks with content. Cached ones become newest of theirs, last one evicted first."""
        if self.level is None:
            self.level = np.zeros(self.num_blocks, np.int8)
        cached = blocks[self.state[blocks] < 0]
        if len(cached):
            self.hold(cached)
        self.level[blocks] = levels
        if len(cached):
            self.release(cached[::-1].copy())

    def keep(self, blocks: Blocks) -> None:
        """`hold` beyond the tables, counted for the checker."""
        self.hold(blocks)
        self.kept.update(blocks.tolist())

    def let_go(self, blocks: Blocks) -> None:
        """Release what `keep` held, last block first."""
        self.kept.subtract(blocks.tolist())
        self.release(blocks[::-1].astype(np.int64))

    def release_one(self, block: int) -> None:
        if self.state[block] != 1:
            self.release(np.array([block]))
            return
        self.state[block] = 0
        self.free_list.put_one(block)

    def release_run(self, blocks: Blocks, run: Run) -> bool:
        """Move these blocks to the cached queue as nodes of `run`, last one evicted first, if each has one reference
        and no node. Return whether it did. Half the operations of `carry` and `release`."""
        count = len(blocks)
        if count > _PATTERN or self.state[blocks].tobytes() != _SOLE_PLAIN[: 8 * count]:
            return False
        self.run[blocks] = run
        self.free_list.put_cached(blocks[::-1], (run, 0, count))
        return True

    def carry(self, blocks: Blocks, run: Run) -> None:
        """Mark these used blocks as carrying nodes of `run`."""
        self.state[blocks] |= _CONTENT
        self.run[blocks] = run

    def forget_content(self, blocks: Blocks) -> None:
        """Take the nodes from these distinct blocks, used or cached; cached ones become free."""
        if not len(blocks):
            return
        self.hold(blocks)
        self.state[blocks] &= _REFERENCES
        if self.level is not None:
            self.level[blocks] = 0
        self.run[blocks] = None
        self.release(blocks[::-1].copy())

    def forget_all(self) -> None:
        """Take the nodes from all blocks; none may be used."""
        cached = self.free_list.cached()
        self.free_list.take_cached(self.num_cached)
        self.state[cached] = 0
        self.free_list.put_plain(cached)
        self.run[:] = None
        self.level = None
