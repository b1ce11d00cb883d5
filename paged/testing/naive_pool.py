"""One tier of the naive model: blocks are objects, content is a tuple, and a list has the cached blocks, oldest first.

free  ── draw ──>  a block with one reference  ── carry ──>  the residence of a node, pending or confirmed
  ^                      │ release                              │ release
  └──────────────────────┘                                      └──> cached ── draw ──> its node is forgotten
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Node = tuple[object, tuple[int, ...]]
"""Content: the namespace, and all tokens from the first one to the end of the block."""


@dataclass(eq=False)
class Block:
    """One block of either tier: references to it, and the node it carries if it has content."""

    refs: int = 0
    node: Node | None = None


class NaivePool:
    """The number of free blocks, the cached ones (oldest first), where nodes reside, and which are pending."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.cached: list[Block] = []
        self.resident: dict[Node, Block] = {}
        # Residences that are not confirmed, with the batch that computes them.
        self.pending: dict[Node, int] = {}
        self.evicted = self.evicted_pending = 0
        # Called with each block whose content is evicted, before that; and with each node that begins or ceases to
        # reside here.
        self.leave: Callable[[Block], None] | None = None
        self.moved: Callable[[Node], None] = lambda node: None
        # The level at which content is retained: the lowest is evicted first.
        self.level: Callable[[Node | None], int] = lambda node: 0

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.free - len(self.cached)

    @property
    def available(self) -> int:
        """Blocks that can be drawn."""
        return self.free + len(self.cached)

    @property
    def confirmed(self) -> set[Node]:
        """Nodes that reside here and have been computed."""
        return self.resident.keys() - self.pending.keys()

    def draw(self) -> Block:
        """Draw a block without content: a free one, else the least recently used of the lowest level."""
        if self.free:
            self.free -= 1
        else:
            oldest = min(self.cached, key=lambda block: self.level(block.node))
            assert oldest.node is not None
            self.evicted += 1
            self.evicted_pending += oldest.node in self.pending
            if self.leave is not None:
                self.leave(oldest)
            self.cached.remove(oldest)
            del self.resident[oldest.node]
            self.pending.pop(oldest.node, None)
            self.moved(oldest.node)
        return Block(refs=1)

    def carry(self, node: Node, block: Block, batch: int | None) -> None:
        """Let the node reside in the block, pending on a batch that is out, or confirmed (None)."""
        is_new, self.resident[node], block.node = node not in self.resident, block, node
        if is_new:
            self.moved(node)
        if batch is not None:
            self.pending[node] = batch

    def hold(self, block: Block) -> None:
        """Add a reference; a cached block leaves the list."""
        if block.refs == 0:
            self.cached.remove(block)
        block.refs += 1

    def release(self, block: Block) -> None:
        """Take a reference; without any the block is the newest of the cached ones, or free if it carries nothing."""
        block.refs -= 1
        if block.refs == 0 and block.node is not None:
            self.cached.append(block)
        elif block.refs == 0:
            self.free += 1

    def touch(self, node: Node) -> None:
        """Let cached content count as used just now."""
        block = self.resident.get(node)
        if block is not None and block.refs == 0:
            self.cached.remove(block)
            self.cached.append(block)

    def confirm(self, batch: int) -> None:
        """Confirm the nodes that the batch computed."""
        self.pending = {node: number for node, number in self.pending.items() if number != batch}

    def withdraw(self, node: Node) -> None:
        """Take the node out of its block, which is free if no row holds it."""
        block = self.resident.pop(node)
        self.pending.pop(node, None)
        block.node = None
        if block.refs == 0:
            self.cached.remove(block)
            self.free += 1

    def forget_all(self) -> None:
        """Free every cached block."""
        self.free += len(self.cached)
        self.cached.clear()
        self.resident.clear()
        self.pending.clear()
