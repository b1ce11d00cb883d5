r"""Put your own engine's KV-cache manager in front of the kit: a home-grown allocator, its adapter, and the bug that comes out.

    pip install '.[testing]'                               # in a checkout of paged
    pytest test_your_own.py                                # the bug is expected, so this passes
    pytest test_your_own.py -k 'not mended' --runxfail     # what the kit says of it

`BlockAllocator` stands for your code: a free list of block ids, ref counts, and a dict from block hash to block id. It knows
nothing of paged. `OurManager` is all that the kit needs beside it. The kit draws pools of a few blocks of 1, 2 or 4 tokens and
calls it in any order, beside a model in plain lists; what it finds is made short. Here it says, after two seconds:

    content that should be gone: (b'None', b'\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00')

    The program:
    rig = ManagerRig(ManagerWorld(num_blocks=1, block_size=4))
    rig.add([0, 0, 0, 0], None)
    rig.allocate([0], [4])
    rig.confirm()
    rig.free([0])
    rig.add([0], None)
    rig.allocate([0], [1])
    rig.confirm()

A sequence of four zeros computes a block, ends, and leaves the block idle. Another one then needs the only block of the pool, so that
content has to go. The allocator still finds it: the next prompt that begins with four zeros would be given the KV of another. The program can
be pasted into a test with `rig = ManagerRig(..., OurManager)`. `MendedAllocator` has the line that was missing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paged.testing import ManagerAdapter, ManagerWorld, Violation, machines


@dataclass
class Sequence:
    """One prompt and its output: the hash that everything in its blocks starts from, and its block table."""

    root: bytes
    block_table: list[int] = field(default_factory=list)


class BlockAllocator:
    """Your allocator. Full blocks are found by the hash of all tokens up to their end; who holds nothing waits in `idle`, oldest first."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.block_size = block_size
        self.caching = caching
        self.free_ids = deque(range(num_blocks))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.ref_count = [0] * num_blocks
        self.hash_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}

    def hashes(self, root: bytes, tokens: list[int]) -> list[bytes]:
        """The chained hash of each full block."""
        if not self.caching:
            return []
        found, size = [root], self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            block = np.array(tokens[start : start + size], np.int32).tobytes()
            found.append(hashlib.sha256(found[-1] + block).digest())
        return found[1:]

    def find_prefix(self, root: bytes, tokens: list[int]) -> list[int]:
        """Blocks that hold the beginning of a prompt; its last token is always computed."""
        found = []
        for block_hash in self.hashes(root, tokens[:-1]):
            if block_hash not in self.block_of:
                break
            found.append(self.block_of[block_hash])
        return found

    def start(self, root: bytes, tokens: list[int]) -> Sequence:
        """A sequence with the blocks that are there for it."""
        sequence = Sequence(root, self.find_prefix(root, tokens))
        for block in sequence.block_table:
            self.hold(block)
        return sequence

    def allocate(self, sequence: Sequence, tokens: list[int]) -> None:
        """Blocks for all of these tokens."""
        while len(sequence.block_table) * self.block_size < len(tokens):
            sequence.block_table.append(self.draw())

    def finish_step(self, sequence: Sequence, tokens: list[int]) -> None:
        """These tokens have been computed: their full blocks can be found, and one whose content is there already gives way to it."""
        for column, block_hash in enumerate(self.hashes(sequence.root, tokens)):
            block = sequence.block_table[column]
            there = self.block_of.setdefault(block_hash, block)
            if there != block:
                self.hold(there)
                sequence.block_table[column] = there
                self.release(block)
            else:
                self.hash_of[block] = block_hash

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended: its blocks are given back, the last one first, so that a prefix outlives what follows it."""
        while sequence.block_table:
            self.release(sequence.block_table.pop())

    def hold(self, block: int) -> None:
        self.ref_count[block] += 1
        self.idle.pop(block, None)

    def release(self, block: int) -> None:
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            if block in self.hash_of:
                self.idle[block] = None
            else:
                self.free_ids.append(block)

    def draw(self) -> int:
        """A block for new tokens: a free one, else the one that has been idle for longest."""
        if self.free_ids:
            block = self.free_ids.popleft()
        else:
            block, _ = self.idle.popitem(last=False)
            self.evict(block)
        self.ref_count[block] = 1
        return block

    def evict(self, block: int) -> None:
        """What the block held is gone. The bug: `block_of` still says that it is there, so a later prompt is given a stranger's KV."""
        del self.hash_of[block]

    def reset(self) -> None:
        self.free_ids.extend(self.idle)
        self.idle.clear()
        self.hash_of.clear()
        self.block_of.clear()


class MendedAllocator(BlockAllocator):
    """The one line that was missing."""

    def evict(self, block: int) -> None:
        del self.block_of[self.hash_of.pop(block)]


class OurManager(ManagerAdapter):
    """What the kit calls, in your allocator's words."""

    allocator: type[BlockAllocator] = BlockAllocator

    def __init__(self, world: ManagerWorld) -> None:
        super().__init__(world.num_blocks, world.block_size)
        self.ours = self.allocator(world.num_blocks, world.block_size, world.prefix_caching)

    def open(self, tokens: list[int], namespace: object) -> Sequence:
        return self.ours.start(repr(namespace).encode(), tokens)

    def grow(self, sequence: Sequence, tokens: list[int]) -> None:
        self.ours.allocate(sequence, tokens)

    def commit(self, sequence: Sequence, tokens: list[int]) -> None:
        self.ours.finish_step(sequence, tokens)

    def close(self, sequence: Sequence) -> None:
        self.ours.finish(sequence)

    def blocks(self, sequence: Sequence) -> SequenceOf[int]:
        return sequence.block_table

    def match(self, tokens: list[int], namespace: object) -> SequenceOf[int]:
        return self.ours.find_prefix(repr(namespace).encode(), tokens)

    def forget_cache(self) -> None:
        self.ours.reset()

    @property
    def num_free(self) -> int:
        return len(self.ours.free_ids)

    @property
    def num_cached(self) -> int:
        return len(self.ours.idle)

    @property
    def ref_counts(self) -> NDArray[Any]:
        return np.array(self.ours.ref_count)


class MendedManager(OurManager):
    allocator = MendedAllocator


class OurMachine(machines.AdapterMachine):
    build = OurManager


class MendedMachine(OurMachine):
    build = MendedManager


@pytest.mark.xfail(raises=Violation, strict=True, reason="evict() leaves the block's hash behind")
def test_our_manager() -> None:
    machines.run_machine(OurMachine, few=200)


def test_our_manager_once_it_is_mended() -> None:
    machines.run_machine(MendedMachine, few=200)
