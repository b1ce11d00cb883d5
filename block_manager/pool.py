"""All blocks of one tier: who holds how many references, which are free, and which content node each one carries.

Knows block ids, reference counts and, for a block with content, the run and the offset of its node. Does not know tables,
rows or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from block_manager.errors import OutOfBlocks
from block_manager.free_list import Blocks, FreeList

if TYPE_CHECKING:
    from block_manager.runs import Run

# The bit of a used block's state that says that it carries a node.
_CONTENT = 1 << 40
_REFERENCES = _CONTENT - 1
# Comparing bytes costs a tenth of a numpy reduction: this is what the states of blocks with one holder look like.
_PATTERN = 1024
_SOLE_WITH_CONTENT = np.full(_PATTERN, _CONTENT + 1, np.int64).tobytes()
_SOLE_PLAIN = np.full(_PATTERN, 1, np.int64).tobytes()
_RISING = np.arange(_PATTERN, dtype=np.int32)


class Pool:
    """`num_blocks` blocks, each *used* (ref count ≥ 1), *cached* (0, with content) or *free* (0, without).

    Columns: `state` int64 [num_blocks], 0 for a free block, minus its segment in the free list for a cached one, the ref count
    for a used one (plus one high bit if it carries a node), so that a release is one read and one write; `offset` int32
    [num_blocks], the node's place in its run, and `run` object [num_blocks], the run itself, where there is a node.
    """

    def __init__(self, num_blocks: int, tier: str, forget: Callable[[Blocks], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.tier = tier
        self.state = np.zeros(num_blocks, np.int64)
        self.offset = np.zeros(num_blocks, np.int32)
        self.run: NDArray[np.object_] = np.empty(num_blocks, object)
        self.free_list = FreeList(self.state)
        # Called with evicted blocks, oldest first, before they are handed out: their nodes lose this residence.
        self.forget = forget

    @property
    def num_free(self) -> int:
        """Blocks with ref count 0 and no content."""
        return self.free_list.num_plain

    @property
    def num_cached(self) -> int:
        """Blocks with ref count 0 and content that a lookup can still find."""
        return self.free_list.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be drawn: free and cached ones."""
        return self.free_list.num_plain + self.free_list.num_cached

    @property
    def num_used(self) -> int:
        """Blocks with a ref count of at least 1."""
        return self.num_blocks - self.num_available

    @property
    def ref_count(self) -> NDArray[np.int32]:
        """int32 [num_blocks]: references to each block; a copy."""
        return self.refs(slice(None))

    def refs(self, blocks: Blocks | slice) -> NDArray[np.int32]:
        """int32 [n]: references to each of these blocks."""
        return (np.maximum(self.state[blocks], 0) & _REFERENCES).astype(np.int32)

    def num_refs(self, block: int) -> int:
        """References to one block."""
        return max(int(self.state[block]), 0) & _REFERENCES

    def has_content(self, blocks: Blocks | slice) -> NDArray[np.bool_]:
        """bool [n]: whether each of these blocks carries a node."""
        state = self.state[blocks]
        return (state < 0) | (state >= _CONTENT)

    def offsets(self, blocks: Blocks) -> list[int]:
        """The place of each block's node in its run, -1 where it carries none."""
        found: list[int] = np.where(self.has_content(blocks), self.offset[blocks], -1).tolist()
        return found

    def require(self, count: int) -> None:
        """Raise OutOfBlocks when fewer than `count` blocks can be drawn."""
        if count > self.num_available:
            raise OutOfBlocks(count, self.num_available, self.tier)

    def draw(self, count: int) -> Blocks:
        """Take `count` blocks without content, ref count 1 each, int64 [count]; evicts where free ones do not suffice.

        Raises OutOfBlocks, taking none.
        """
        free_list = self.free_list
        num_plain = free_list.num_plain
        if count <= num_plain:
            blocks = free_list.take_plain(count)
        else:
            self.require(count)
            blocks = free_list.take_cached(count - num_plain)
            if self.forget is not None:
                self.forget(blocks)
            if num_plain:
                blocks = np.concatenate([free_list.take_plain(num_plain), blocks])
        self.state[blocks] = 1
        return blocks

    def hold(self, blocks: Blocks) -> None:
        """One more reference to each of these distinct blocks, which are used or cached."""
        state = self.state[blocks]
        is_cached = state < 0
        num_cached = int(np.count_nonzero(is_cached))
        if num_cached:
            state[is_cached] = _CONTENT
            self.free_list.take_out(num_cached)
        self.state[blocks] = state + 1

    def release(self, blocks: Blocks) -> None:
        """One reference less to each of these distinct blocks, in the order in which they are to be reused.

        Those that reach 0 become cached if they have content, and free if not. The array belongs to the pool from now on.
        """
        held = self.state[blocks]
        looks = held.tobytes()
        if len(blocks) <= _PATTERN:
            if looks == _SOLE_WITH_CONTENT[: len(looks)]:
                if len(blocks):
                    self.free_list.put_cached(blocks)
                return
            if looks == _SOLE_PLAIN[: len(looks)]:
                self.state[blocks] = 0
                self.free_list.put_plain(blocks)
                return
        held -= 1
        self.state[blocks] = held
        is_free = held & _REFERENCES == 0
        has_content = held >= _CONTENT
        plain, cached = blocks[is_free & ~has_content], blocks[is_free & has_content]
        if len(plain):
            self.free_list.put_plain(plain)
        if len(cached):
            self.free_list.put_cached(cached)

    def carry(self, blocks: Blocks, run: Run, first: int) -> None:
        """These used blocks carry the nodes of `run` from offset `first` on."""
        count = len(blocks)
        self.state[blocks] |= _CONTENT
        self.run[blocks] = run
        self.offset[blocks] = (
            _RISING[first : first + count] if first + count <= _PATTERN else np.arange(first, first + count)
        )

    def forget_all(self) -> None:
        """No block carries a node any more; the caller has seen that none is used."""
        cached = self.free_list.take_cached(self.num_cached)
        self.state[cached] = 0
        self.free_list.put_plain(cached)
        self.run[:] = None
