"""An adapter of a few methods is a whole manager, and what it slips on is named."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from paged.errors import (
    DuplicateRow,
    InvalidConfig,
    InvalidTokens,
    NothingInFlight,
    OutOfBlocks,
    RowInFlight,
    UnknownRow,
)
from paged.testing import BrokenPromise, KVManager, ManagerAdapter, ManagerWorld, Violation, held_to, replay
from paged.testing.machines import AdapterMachine, run_machine


@dataclass
class Table:
    blocks: list[int] = field(default_factory=list)


class Plain(ManagerAdapter):
    """Blocks on a free list; nothing is shared."""

    capabilities = replace(ManagerAdapter.capabilities, prefix_cache=False)

    def __init__(self, world):
        super().__init__(world.num_blocks, world.block_size)
        self.free_ids = deque(range(world.num_blocks))
        self.held = [0] * world.num_blocks

    def open(self, tokens, namespace):
        return Table()

    def grow(self, sequence, tokens):
        while len(sequence.blocks) * self.block_size < len(tokens):
            sequence.blocks.append(self.free_ids.popleft())
            self.held[sequence.blocks[-1]] = 1

    def commit(self, sequence, tokens):
        pass

    def close(self, sequence):
        for block in sequence.blocks:
            self.held[block] = 0
        self.free_ids.extend(sequence.blocks)

    def blocks(self, sequence):
        return sequence.blocks

    @property
    def num_free(self):
        return len(self.free_ids)

    @property
    def ref_counts(self):
        return np.array(self.held)


class PlainMachine(AdapterMachine):
    build = Plain
    capabilities = Plain.capabilities


def test_an_adapter_is_a_manager_and_keeps_its_promises():
    manager = held_to("KVManager", Plain(ManagerWorld(num_blocks=3, block_size=2)))
    assert isinstance(Plain(ManagerWorld()), KVManager)
    row = manager.add([1, 2, 3])
    manager.allocate([row], [3])
    manager.confirm()
    assert manager.slots(row, 1, 3).tolist() == [1, 2]
    assert (manager.device.num_used, manager.device.states.tolist()) == (2, [2, 2, 0])


def test_an_allocator_without_a_cache_passes_the_machine():
    run_machine(PlainMachine, few=40)


@pytest.mark.parametrize(
    ("error", "verb", "arguments"),
    [
        (UnknownRow, "table", (7,)),
        (UnknownRow, "free", ([7],)),
        (DuplicateRow, "free", ([0, 0],)),
        (RowInFlight, "free", ([1],)),
        (RowInFlight, "append", (1, [2])),
        (InvalidTokens, "allocate", ([0], [9])),
        (InvalidTokens, "add", ([],)),
        (InvalidConfig, "truncate", (0, 99)),
        (OutOfBlocks, "allocate", ([0], [5])),
    ],
)
def test_misuse_is_refused_by_type_and_changes_nothing(error, verb, arguments):
    manager = Plain(ManagerWorld(num_blocks=2, block_size=2))
    for tokens in ([1] * 5, [1, 2]):
        manager.add(tokens)
    manager.allocate([1], [2])
    before = manager.snapshot()
    with pytest.raises(error):
        getattr(manager, verb)(*arguments)
    assert manager.snapshot() == before


@pytest.mark.parametrize("verb", ["confirm", "cancel"])
def test_without_a_batch_there_is_nothing_to_end(verb):
    manager = Plain(ManagerWorld(num_blocks=2, block_size=2))
    manager.add([1])
    before = manager.snapshot()
    with pytest.raises(NothingInFlight):
        getattr(manager, verb)()
    assert manager.snapshot() == before


def test_batches_of_an_adapter_end_oldest_first():
    manager = Plain(ManagerWorld(num_blocks=2, block_size=2))
    for _ in range(2):
        manager.allocate([manager.add([1, 2])], [2])
        manager.next_batch()
    assert (manager.confirm(), manager.rows.num_computed.tolist()) == (1, [2, 0])
    assert (manager.confirm(), manager.rows.num_computed.tolist()) == (2, [2, 2])


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("blocks", None, "blocks(sequence) gave None; ManagerAdapter asks for block ids from 0 to 1."),
        ("blocks", [2], "blocks(sequence) gave [2]; ManagerAdapter asks for block ids from 0 to 1."),
        ("match", [0.5], "match([1, 1], None) gave [0.5]; ManagerAdapter asks for block ids"),
    ],
)
def test_a_slip_of_the_allocator_is_named(name, answer, words):
    kind = type("Ours", (Plain,), {name: lambda self, *arguments: answer})
    with pytest.raises(BrokenPromise) as caught:
        kind(ManagerWorld(num_blocks=2, block_size=1)).lookup([1, 1]) if name == "match" else kind(ManagerWorld(2)).add(
            [1]
        )
    assert f"Ours.{words}" in str(caught.value)


def test_a_broken_promise_is_a_violation_with_its_program():
    kind = type("Ours", (Plain,), {"num_free": property(lambda self: 2.0)})
    with pytest.raises(
        Violation, match=r"Ours\.device\.num_free gave 2\.0; KVManager promises an int of at least 0"
    ) as caught:
        replay(ManagerWorld(num_blocks=2), [("add", ([1], None))], kind)
    assert caught.value.program.lines[-1] == "rig.add([1], None)"
