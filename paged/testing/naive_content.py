"""The naive model's content: both tiers, the place of each prefix, and what is pinned or kept longer."""

from __future__ import annotations

from collections.abc import Sequence

from paged.testing.naive_pool import Block, NaivePool, Node


class NaiveContent:
    """Both tiers of the naive model, and questions about content alone."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        prefix_caching: bool = True,
        *,
        host_caching: bool = False,
        least_load: int = 0,
        shares_in_flight: bool = True,
    ) -> None:
        """`host_caching`: content that leaves the device goes to the host; a hit on `least_load` tokens there or more is loaded.

        Unless it `shares_in_flight`, content can be found once it has been computed, and not before.
        """
        self.block_size = block_size
        self.host_caching = host_caching
        self.least_load = least_load
        self.shares_in_flight = shares_in_flight
        self.prefix_caching = prefix_caching
        self.device = NaivePool(num_blocks)
        self.host = NaivePool(host_blocks)
        # Copies of content that the call under way makes, (source, destination), and the host blocks that they touch.
        self.offloaded: list[tuple[Block, Block]] = []
        self.loaded: list[tuple[Block, Block]] = []
        self._touched: list[Block] = []
        # Retentions by number: nodes in order, and their level; when each ends.
        self.retentions: dict[int, tuple[list[Node], int]] = {}
        self.ends: dict[int, float] = {}
        self.device.level = self.host.level = self.level
        if host_caching:
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
        """Blocks after the first `have` that hold this prompt, all but its last token at most; the first pending one's index."""
        found: list[Block] = []
        first_pending = None
        for num_blocks in range(have + 1, (len(tokens) - 1) // self.block_size + 1):
            node = self.node(namespace, tokens, num_blocks)
            if node not in self.device.resident:
                break
            if node in self.device.pending and first_pending is None:
                first_pending = num_blocks - 1
            found.append(self.device.resident[node])
        return found, first_pending

    def lookup_on_host(self, tokens: Sequence[int], namespace: object, have: int) -> list[Block]:
        """Host blocks that hold this prompt after its first `have` blocks, all but its last token at most."""
        found: list[Block] = []
        if not self.host_caching:
            return found
        for num_blocks in range(have + 1, (len(tokens) - 1) // self.block_size + 1):
            node = self.node(namespace, tokens, num_blocks)
            if node not in self.host.confirmed:
                break
            found.append(self.host.resident[node])
        return found

    def take_copies(self) -> tuple[list[tuple[Block, Block]], list[tuple[Block, Block]]]:
        """(to the host, to the device): the copies of content that the last call made. Until now no other node could have the host
        blocks that they read or write."""
        copies = self.offloaded, self.loaded
        touched, self._touched, self.offloaded, self.loaded = self._touched, [], [], []
        for block in touched:
            self.host.release(block)
        return copies

    def prefix(self, tokens: Sequence[int], namespace: object) -> list[Node]:
        """The confirmed nodes of a prompt from the first one on, each in one tier at least."""
        found: list[Node] = []
        for num_blocks in range(1, len(tokens) // self.block_size + 1):
            node = self.node(namespace, tokens, num_blocks)
            if node not in self.device.confirmed and node not in self.host.confirmed:
                break
            found.append(node)
        return found

    def retain(self, number: int, nodes: list[Node], level: int, until: float | None) -> None:
        """These nodes, a prefix, go after all of a lower level. What is at this level by now is as new as what was raised to it: a parent
        must not go before its child."""
        self.retentions[number] = nodes, level
        if until is not None:
            self.ends[number] = until
        self._touch([node for node in nodes if self.level(node) == level])

    def expire(self, now: float) -> None:
        """What ends by now has ended, in order."""
        for _, number in sorted((when, number) for number, when in self.ends.items() if when <= now):
            del self.ends[number]
            before = {node: self.level(node) for node in self.retentions.get(number, ([], 0))[0]}
            self.retentions.pop(number, None)
            self._touch([node for node in before if self.level(node) != before[node]])

    def level(self, node: Node | None) -> int:
        """The highest level at which a retention keeps it."""
        return max((level for nodes, level in self.retentions.values() if node in nodes), default=0)

    def forget_dead(self) -> None:
        """A node that is nowhere, with nothing below it, is known no more: what becomes of the same tokens later is another one."""
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
        """Content is about to be forgotten on the device: the host keeps it, if it has a block for it, free or with content that is
        retained no longer."""
        assert block.node is not None
        # Copied by calls whose moves run together with this one's: it goes before it has come.
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
