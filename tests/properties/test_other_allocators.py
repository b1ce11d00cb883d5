"""Allocators of others behind the adapter, each with a bug that engines have had: found at once, and told by the shortest program.

One copies on write and takes who began a block for its only holder; one has a host tier and brings blocks back last one first. The
same two without the bug are found nothing wrong with. What an adapter of a few methods slips on is named.
"""

import dataclasses

import numpy as np
import pytest

from conformance.vllm.manager_rig import VllmManagerRig
from paged import BlockManager
from paged.errors import PagedError
from paged.testing import (
    BrokenPromise,
    KVManager,
    ManagerAdapter,
    ManagerRig,
    ManagerWorld,
    Violation,
    machines,
    replay,
)

from ..shown import assert_refused, shown_in  # noqa: TID252

WITHOUT_CACHE = dataclasses.replace(ManagerAdapter.capabilities, prefix_cache=False)


class Table:
    def __init__(self):
        self.blocks, self.on_host = [], []
        self.num_written = 0


class Pool:
    """Blocks with reference counts."""

    def __init__(self, num_blocks):
        self.free = list(range(num_blocks))
        self.counts = np.zeros(num_blocks, np.int64)
        # Who began each block.
        self.owners = [None] * num_blocks

    def take(self, owner):
        block = self.free.pop(0)
        self.counts[block], self.owners[block] = 1, owner
        return block

    def drop(self, block):
        self.counts[block] -= 1
        if not self.counts[block]:
            self.free.append(block)


class Plain(ManagerAdapter):
    """An allocator without a prefix cache."""

    capabilities = WITHOUT_CACHE

    def __init__(self, world):
        super().__init__(world.num_blocks, world.block_size, world.host_blocks)
        self.pool, self.host_pool = Pool(world.num_blocks), Pool(world.host_blocks)

    def open(self, tokens, namespace):
        return Table()

    def grow(self, table, tokens):
        while len(table.blocks) * self.block_size < len(tokens):
            table.blocks.append(self.pool.take(table))

    def commit(self, table, tokens):
        table.num_written = len(tokens)

    def close(self, table):
        for block in table.blocks:
            self.pool.drop(block)
        for block in table.on_host:
            self.host_pool.drop(block)

    def blocks(self, table):
        return table.blocks

    num_free = property(lambda self: len(self.pool.free))
    ref_counts = property(lambda self: self.pool.counts)


class CopiesOnWrite(Plain):
    """Forks share all blocks; who writes into a shared one has a copy of it first."""

    capabilities = dataclasses.replace(WITHOUT_CACHE, fork=True)

    def split(self, table):
        fork = Table()
        fork.blocks, fork.num_written = list(table.blocks), table.num_written
        self.pool.counts[fork.blocks] += 1
        return fork

    def grow(self, table, tokens):
        copies, at = [], table.num_written
        if at % self.block_size and at // self.block_size < len(table.blocks):
            block = table.blocks[at // self.block_size]
            if self.must_copy(table, block):
                copy = table.blocks[at // self.block_size] = self.pool.take(table)
                self.pool.drop(block)
                copies.append((block, copy))
        super().grow(table, tokens)
        return copies

    def must_copy(self, table, block):
        return self.pool.counts[block] > 1


class OwnersWriteInPlace(CopiesOnWrite):
    """The bug: who began a block goes on to write it, though a fork reads it."""

    def must_copy(self, table, block):
        return super().must_copy(table, block) and self.pool.owners[block] is not table


class HasHost(Plain):
    """A sequence's last blocks go to the host, and return."""

    capabilities = dataclasses.replace(WITHOUT_CACHE, host_tier=True)

    def leave(self, table, keep):
        copies = [(block, self.host_pool.take(table)) for block in table.blocks[keep:]]
        for block, _ in copies:
            self.pool.drop(block)
        # A sequence that is partly there already has the blocks before those that it has there.
        table.blocks, table.on_host = table.blocks[:keep], [there for _, there in copies] + table.on_host
        return copies

    def come_back(self, table):
        copies = [(block, self.pool.take(table)) for block in self.in_order(table.on_host)]
        for block, _ in copies:
            self.host_pool.drop(block)
        table.blocks, table.on_host = table.blocks + [back for _, back in copies], []
        return copies

    def in_order(self, blocks):
        return blocks

    def host_blocks(self, table):
        return table.on_host

    host_free = property(lambda self: len(self.host_pool.free))
    host_ref_counts = property(lambda self: self.host_pool.counts)


class ReturnsLastFirst(HasHost):
    """The bug: what was pushed last is popped first."""

    def in_order(self, blocks):
        return blocks[::-1]


def machine_of(allocator):
    class Machine(machines.AdapterMachine):
        build = allocator

    return Machine


class SaysNothing(Plain):
    """Without a prefix cache, and it does not say so."""

    capabilities = ManagerAdapter.capabilities

    def match(self, tokens, namespace):
        return []

    def forget_cache(self):
        pass


def test_a_manager_that_finds_no_content_is_asked_to_say_that_it_has_no_prefix_cache():
    with pytest.raises(Violation, match=r"is not found: .*\n?.*Capabilities\(prefix_cache=False\)") as caught:
        machines.run_machine(machine_of(SaysNothing), few=50, steps=20)
    assert [verb for verb, _ in caught.value.program.calls] == ["add", "allocate", "confirm"]


@pytest.mark.parametrize("allocator", [CopiesOnWrite, HasHost])
def test_nothing_is_wrong_without_the_bug(allocator):
    machines.run_machine(machine_of(allocator), few=50, steps=20)


@pytest.mark.parametrize(
    ("allocator", "verbs"),
    [
        (OwnersWriteInPlace, ["add", "allocate", "confirm", "fork", "append", "allocate"]),
        (ReturnsLastFirst, ["add", "allocate", "confirm", "swap_out", "swap_in"]),
    ],
)
def test_the_bug_is_found_and_its_program_has_no_call_too_many(allocator, verbs):
    with pytest.raises(Violation) as caught:
        machines.run_machine(machine_of(allocator), few=200, steps=20)
    program = caught.value.program
    assert [verb for verb, _ in program.calls] == verbs
    assert program.world.num_blocks == 2
    with pytest.raises(Violation):
        replay(program.world, program.calls, allocator, drain=True)


def test_what_capabilities_leave_out_is_never_called():
    class Bare:
        """A manager with what every one has to have, behind which no other method is found."""

        capabilities = WITHOUT_CACHE

        def __init__(self, world):
            self.ours = Plain(world)

        def __getattr__(self, name):
            if name not in {*dir(KVManager), *KVManager.__annotations__, "lookup", "snapshot"}:
                raise AttributeError(name)
            return getattr(self.ours, name)

    machines.run_machine(machine_of(Bare), few=30, steps=20)


@pytest.mark.parametrize("rig", [ManagerRig, VllmManagerRig])
def test_a_rig_by_hand_leaves_the_cache_out_as_capabilities_say(rig):
    rig = rig(ManagerWorld(num_blocks=2, block_size=1, prefix_caching=rig is ManagerRig), Plain)
    rig.add([1, 1])
    rig.allocate([0], [2])
    rig.confirm()
    rig.drain()


def test_an_allocator_that_needs_more_than_a_block_is_never_made_with_less():
    def build(world):
        assert (world.num_blocks, world.block_size) == (4, 2)
        return BlockManager(4, 2)

    replay(
        ManagerWorld(num_blocks=4, block_size=2), [("add", ([1, 1],)), ("allocate", ([0], [2])), ("confirm", ())], build
    )


def test_an_adapter_is_a_manager():
    assert isinstance(Plain(ManagerWorld()), KVManager)


def ours(name, answer):
    """An allocator whose method `name` answers with something else; it has a row unless that asks the method."""
    manager = type("Ours", (HasHost,), {name: lambda self, *arguments: answer})(ManagerWorld(2, 1, host_blocks=1))
    if name not in ("blocks", "match"):
        manager.add([1])
    return manager


def with_host(**also):
    """An allocator with a host tier that says that it can do more."""
    capabilities = dataclasses.replace(HasHost.capabilities, **also)
    return type("Ours", (HasHost,), {"capabilities": capabilities})(ManagerWorld())


@pytest.mark.parametrize(("call", "shown"), shown_in("properties/refused_by_adapters.txt", ">>>"))
def test_misuse_and_slips_are_named_and_change_nothing(call, shown):
    idle, manager = (Plain(ManagerWorld(num_blocks=2, block_size=2)) for _ in range(2))
    for tokens in ([1] * 5, [1, 2]):
        manager.add(tokens)
    manager.allocate([1], [2])
    before = manager.snapshot()
    assert_refused(call, shown, globals() | {"idle": idle, "manager": manager}, (PagedError, BrokenPromise))
    assert manager.snapshot() == before


def test_a_broken_promise_is_a_violation_with_its_program():
    kind = type("Ours", (Plain,), {"num_free": property(lambda self: 2.0)})
    words = r"Ours\.device\.num_free gave 2\.0; KVManager promises an int of at least 0"
    with pytest.raises(Violation, match=words) as caught:
        replay(ManagerWorld(num_blocks=2), [("add", ([1], None))], kind)
    assert caught.value.program.lines[-1] == "rig.add([1], None)"
