"""The naive model's content: both tiers, the place of each prefix, and what is retained.

Blocks are objects, content is a tuple, and a list has the cached blocks of a tier, oldest first.

free  ── draw ──>  a block with one reference  ── carry ──>  the residence of a node, pending or confirmed
  ^                      │ release                              │ release
  └──────────────────────┘                                      └──> cached ── draw ──> its node is forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile

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


@dataclass(eq=False)
class NaiveContent:
    """Both tiers of the naive model, and questions about content alone.

    `host_caching`: content that leaves the device goes to the host; a hit on `least_load` tokens there or more is
    loaded. `shares_in_flight`: content is found as soon as a batch that is out computes it, not only once it has been
    computed.
    """

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    prefix_caching: bool = True
    _: KW_ONLY
    host_caching: bool = False
    least_load: int = 0
    shares_in_flight: bool = True

    def __post_init__(self) -> None:
        self.device, self.host = NaivePool(self.num_blocks), NaivePool(self.host_blocks)
        # Copies of content that the call under way makes, (source, destination), and the host blocks that they touch.
        self.offloaded: list[tuple[Block, Block]] = []
        self.loaded: list[tuple[Block, Block]] = []
        self._touched: list[Block] = []
        # Retentions by number: nodes in order, and their level; when each ends.
        self.retentions: dict[int, tuple[list[Node], int]] = {}
        self.ends: dict[int, float] = {}
        self.device.level = self.host.level = self.level
        if self.host_caching:
            self.device.leave = self._offload
            # What the device has, too, goes first on the host; what it has no more counts as used then.
            self.host.level = lambda node: -1 if node in self.device.resident else self.level(node)
            self.device.moved = self.host.touch

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def node(self, namespace: object, tokens: Sequence[int], num_blocks: int) -> Node:
        """The content of the last of the first `num_blocks` blocks."""
        return namespace, tuple(tokens[: num_blocks * self.block_size])

    def lookup(self, tokens: Sequence[int], namespace: object, have: int = 0) -> tuple[list[Block], int | None]:
        """Blocks that hold this prompt without its last token, after the first `have`; the first pending index."""
        nodes = self._leading(tokens[:-1], namespace, have, self.device.resident)
        pending = (have + place for place, node in enumerate(nodes) if node in self.device.pending)
        return [self.device.resident[node] for node in nodes], next(pending, None)

    def lookup_on_host(self, tokens: Sequence[int], namespace: object, have: int) -> list[Block]:
        """Host blocks that hold this prompt after its first `have` blocks, all but its last token at most."""
        nodes = self._leading(tokens[:-1], namespace, have, self.host.confirmed if self.host_caching else ())
        return [self.host.resident[node] for node in nodes]

    def take_copies(self) -> tuple[list[tuple[Block, Block]], list[tuple[Block, Block]]]:
        """Return the copies of content that the last call made, (to the host, to the device), and release the host
        blocks that they read and write: until now these were not to be had for other content."""
        copies = self.offloaded, self.loaded
        touched, self._touched, self.offloaded, self.loaded = self._touched, [], [], []
        for block in touched:
            self.host.release(block)
        return copies

    def prefix(self, tokens: Sequence[int], namespace: object) -> list[Node]:
        """The confirmed nodes of a prompt from the first one on, each in one tier at least."""
        return self._leading(tokens, namespace, 0, self.device.confirmed | self.host.confirmed)

    def _leading(self, tokens: Sequence[int], namespace: object, have: int, there: Container[Node]) -> list[Node]:
        """The nodes of a prompt after its first `have` blocks, up to the first that is not there."""
        ends = range(have + 1, len(tokens) // self.block_size + 1)
        return [*takewhile(lambda node: node in there, (self.node(namespace, tokens, end) for end in ends))]

    def retain(self, number: int, nodes: list[Node], level: int, until: float | None) -> None:
        """Evict these nodes, a prefix, after all of a lower level. Those that are at this level now count as used just
        now: a parent must not go before its child."""
        self.retentions[number] = nodes, level
        if until is not None:
            self.ends[number] = until
        self._touch([node for node in nodes if self.level(node) == level])

    def expire(self, now: float) -> None:
        """End the retentions whose time has come, in the order of their ends."""
        for _, number in sorted((when, number) for number, when in self.ends.items() if when <= now):
            del self.ends[number]
            before = {node: self.level(node) for node in self.retentions[number][0]}
            del self.retentions[number]
            self._touch([node for node in before if self.level(node) != before[node]])

    def level(self, node: Node | None) -> int:
        """The highest level at which a retention keeps it."""
        return max((level for nodes, level in self.retentions.values() if node in nodes), default=0)

    def forget_dead(self) -> None:
        """End retention of nodes that are nowhere, with nothing below: later content of the same tokens is new."""
        lives = self.living_nodes()
        for number, (nodes, level) in list(self.retentions.items()):
            self.retentions[number] = [node for node in nodes if node in lives], level

    def _touch(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            self.device.touch(node)
            if not self.host_caching or node not in self.device.resident:
                self.host.touch(node)

    def living_nodes(self) -> set[Node]:
        """Nodes that reside in a tier, pending or not, or have one below them that does."""
        known = [*self.device.resident, *self.host.resident]
        return {(n, tokens[:end]) for n, tokens in known for end in range(0, len(tokens) + 1, self.block_size)}

    def _offload(self, block: Block) -> None:
        """Keep content that leaves the device on the host, in a block that is free or of no higher level."""
        assert block.node is not None
        # A copy to this block that is still to run is not needed any more.
        self.loaded = [(source, target) for source, target in self.loaded if target is not block]
        there, level = self.host.resident.get(block.node), self.level(block.node)
        if there is not None:
            self.host.hold(there)
        elif self.host.free or any(self.host.level(cached.node) <= level for cached in self.host.cached):
            there = self.host.draw()
            self.host.carry(block.node, there, self.device.pending.get(block.node))
            self.offloaded.append((block, there))
        else:
            return
        self._touched.append(there)
