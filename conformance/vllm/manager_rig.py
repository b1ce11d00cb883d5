"""The kit's rig and state machine for a manager that publishes first and keeps duplicates, as vLLM's does.

Three rules of memory are other ones there, on purpose, and the naive model is given those instead of ours: a full block can be hit from
the moment that it is allocated, not when it has been computed; of two blocks with one content both keep it, tables never switch, and
the one that was published first is handed out; a row that has blocks looks nothing up any more. All else is the kit's: tables, ref
counts, hits, free and cached and used, which content survives, the order of eviction, and what every slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from conformance.vllm.manager import CAPABILITIES, VllmManager
from paged.testing.machines import ManagerMachine
from paged.testing.manager_machine import chosen
from paged.testing.manager_rig import ManagerRig, ManagerWorld
from paged.testing.naive_content import Block, NaivePool, Node
from paged.testing.naive_model import NaiveManager, Shown
from paged.testing.strategies import manager_worlds, picks, prompts, where
from paged.testing.violation import Program


class KeepBothPool(NaivePool):
    """Several blocks may carry one node; `resident` names the one that was published first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.carriers: dict[Node, list[Block]] = {}

    def publish(self, node: Node, block: Block) -> None:
        """From now on the node can be hit in this block, unless another one was there before."""
        block.node = node
        self.carriers.setdefault(node, []).append(block)
        self.resident.setdefault(node, block)

    def draw(self) -> Block:
        """As ever, but the node lives on if another block carries it."""
        if self.free:
            self.free -= 1
            return Block(refs=1)
        oldest = self.cached.pop(0)
        assert oldest.node is not None
        others = self.carriers[oldest.node]
        others.remove(oldest)
        if others:
            self.resident[oldest.node] = others[0]
        else:
            del self.resident[oldest.node], self.carriers[oldest.node]
        self.evicted += 1
        return Block(refs=1)

    def forget_all(self) -> None:
        """Every cached block becomes free."""
        super().forget_all()
        self.carriers.clear()


class PublishFirstManager(NaiveManager):
    """The rules of the memory layer with the three that differ."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0, prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, host_blocks, prefix_caching, shares_in_flight=False)
        self.pool = KeepBothPool(num_blocks)
        self.device = self.pool

    def announce(self, numbers: Sequence[int], shown: Shown | None = None) -> None:
        """What is in flight is content already."""
        for row in (self.rows[number] for number in numbers if self.prefix_caching):
            start, end = row.shares[self.batch]
            for column in range(start // self.block_size, end // self.block_size):
                self.pool.publish(self.node(row.namespace, row.tokens, column + 1), row.table[column])

    def confirm(self, shown: Shown | None = None) -> None:
        """Only the counts move."""
        batch = self._end(0)
        self.placed.pop(batch)
        for row in self.rows.values():
            if batch in row.shares:
                row.computed = row.shares.pop(batch)[1]
                row.has_computed = True


class VllmManagerRig(ManagerRig):
    """`ManagerRig` beside the other naive model, and one call more: the client of a row in flight is gone."""

    naive: PublishFirstManager

    def __init__(self, world: ManagerWorld, build: Callable[[ManagerWorld], Any] | None = None) -> None:
        super().__init__(world, build or build_vllm)
        self.naive = PublishFirstManager(world.num_blocks, world.block_size, 0, world.prefix_caching)

    @property
    def program(self) -> Program:
        """What led here."""
        return Program("VllmManagerRig", self.world, tuple(self.calls))

    def allocate(self, rows: Sequence[int], counts: Sequence[int], coming: Sequence[list[int]] = ()) -> None:
        """As ever; counts how often content gets a second block."""
        super().allocate(rows, counts, coming)
        self.events["duplicate kept"] += any(len(blocks) > 1 for blocks in self.naive.pool.carriers.values())

    def abort(self, row: int) -> None:
        """Free a row whose batch is outstanding, as vLLM does at once; the engine computes it all the same."""
        self._note("abort", row)
        self.events["abort in flight"] += 1
        self.manager.free([row])
        self.naive.free([row])
        self._compare()

    def _content_differences(self, contents: set[tuple[bytes, ...]]) -> list[str]:
        """Which content survives; here several blocks may carry the same."""
        pool = self.naive.pool
        expected = {self._path(node) for node in pool.resident}
        found = [f"content forgotten: {path}" for path in expected - contents]
        found += [f"content that should be gone: {path}" for path in contents - expected]
        held = {block for row in self.naive.rows.values() for block in row.table} | self._carriers().keys()
        self.ids = {block: id for block, id in self.ids.items() if block in held}
        if len(set(self.ids.values())) < len(self.ids):
            found.append("one block holds two contents")
        return found

    def _carriers(self) -> dict[Block, Node]:
        return {block: node for node, blocks in self.naive.pool.carriers.items() for block in blocks}

    def _misplaced_nodes(self) -> list[str]:
        """Every block that carries content holds it."""
        found = []
        for block, (namespace, tokens) in self._carriers().items():
            slots = self.shadow.device[self.ids[block]].tolist()
            if slots != self.shadow.contents.path(namespace, tokens)[-self.world.block_size :].tolist():
                held_there = [self.shadow.contents.describe(content) for content in slots]
                found.append(f"4: a block of {tokens} holds {held_there}")
        return found

    def _path(self, node: Node) -> tuple[bytes, ...]:
        """A node as `cached_contents` spells it; the adapter's spelling is known, and a probe could hit what is wrong."""
        namespace, tokens = node
        data, size = np.array(tokens, np.int32).tobytes(), 4 * self.world.block_size
        return (repr(namespace).encode(), *(data[start : start + size] for start in range(0, len(data), size)))


def build_vllm(world: ManagerWorld) -> VllmManager:
    """vLLM's manager in a world of the kit."""
    return VllmManager(world.num_blocks, world.block_size, prefix_caching=world.prefix_caching)


class VllmManagerMachine(ManagerMachine):
    """The kit's machine without what vLLM's manager does not know, and with aborts in flight."""

    build = staticmethod(build_vllm)
    capabilities = CAPABILITIES

    # Rows that do not exist cannot be named to a manager without row numbers.
    misuse = None

    @initialize(world=manager_worlds(), opening=st.lists(prompts(), min_size=2, max_size=4))
    def begin(self, world: ManagerWorld, opening: list[list[int]]) -> None:
        self.rig = VllmManagerRig(
            ManagerWorld(world.num_blocks, world.block_size, 0, world.prefix_caching), type(self).build
        )
        for number, tokens in enumerate(opening):
            self.serve(tokens, None, "free" if number % 2 else "confirm")

    @where(lambda self: len(self.rig.idle_rows) < len(self.rig.rows))
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.rig.abort(chosen([row for row in self.rig.rows if row not in self.rig.idle_rows], pick))


__all__ = ["PublishFirstManager", "VllmManagerMachine", "VllmManagerRig", "build_vllm"]
