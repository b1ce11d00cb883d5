"""All blocks of one tier: who holds how many references, which are free, and which content node each one carries.

Knows block ids, reference counts and, for a block with content, the run and the offset of its node. Does not know tables,
rows or tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from block_manager.errors import OutOfBlocks
from block_manager.free_list import Blocks, FreeList


class Pool:
    """`num_blocks` blocks, each *used* (ref count ≥ 1), *cached* (0, with content) or *free* (0, without).

    Columns: `ref_count` int32 [num_blocks]; `offset` int32 [num_blocks], the node's place in its run, -1 without content;
    `run` object [num_blocks], the run itself where the offset says that there is one.
    """

    def __init__(self, num_blocks: int, tier: str, forget: Callable[[Blocks], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.tier = tier
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.offset = np.full(num_blocks, -1, np.int32)
        self.run: NDArray[np.object_] = np.empty(num_blocks, object)
        self.free_list = FreeList(num_blocks)
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

    def require(self, count: int) -> None:
        """Raise OutOfBlocks when fewer than `count` blocks can be drawn."""
        if count > self.num_available:
            raise OutOfBlocks(count, self.num_available, self.tier)

    def draw(self, count: int) -> Blocks:
        """Take `count` blocks without content, ref count 1 each, int32 [count]; evicts where free ones do not suffice.

        Raises OutOfBlocks, taking none.
        """
        free_list = self.free_list
        if count <= free_list.num_plain:
            blocks = free_list.take_plain(count)
        else:
            self.require(count)
            num_plain = free_list.num_plain
            plain = free_list.take_plain(num_plain)
            evicted = free_list.take_cached(count - num_plain)
            if self.forget is not None:
                self.forget(evicted)
            self.offset[evicted] = -1
            blocks = np.concatenate([plain, evicted]) if num_plain else evicted
        self.ref_count[blocks] = 1
        return blocks

    def hold(self, blocks: Blocks) -> None:
        """One more reference to each of these distinct blocks, which are used or cached."""
        counts = self.ref_count[blocks]
        if not counts.all():
            self.free_list.take_out(blocks[counts == 0])
        self.ref_count[blocks] = counts + 1

    def release(self, blocks: Blocks) -> None:
        """One reference less to each of these distinct blocks, in the order in which they are to be reused.

        Those that reach 0 become cached if they have content, and free if not.
        """
        counts = self.ref_count[blocks]
        if np.count_nonzero(counts != 1):
            counts -= 1
            self.ref_count[blocks] = counts
            blocks = blocks[counts == 0]
        else:
            self.ref_count[blocks] = 0
        has_content = self.offset[blocks] >= 0
        num_content = np.count_nonzero(has_content)
        if num_content == len(blocks):
            if num_content:
                self.free_list.put_cached(blocks)
        elif num_content == 0:
            self.free_list.put_plain(blocks)
        else:
            self.free_list.put_plain(blocks[~has_content])
            self.free_list.put_cached(blocks[has_content])

    def drop_content(self, blocks: Blocks) -> None:
        """These blocks carry no node any more; those with ref count 0 turn from cached to free."""
        self.offset[blocks] = -1
        unused = blocks[self.ref_count[blocks] == 0]
        if len(unused):
            self.free_list.make_plain(unused)
