"""The kit is worth what it catches: each planted fault is one way to get memory or decisions wrong, and has to be found."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from paged import BlockManager, Moves, OutOfBlocks, Scheduler
from paged.testing import Violation, random_program
from paged.testing.machines import ManagerMachine, SchedulerMachine
from paged.testing.world import build_scheduler


class ForgetsHits(BlockManager):
    """Takes one block less than the cache holds."""

    def add(self, tokens, *, namespace=None):
        row = super().add(tokens, namespace=namespace)
        self.truncate(row, max(0, len(self.table(row)) - 1))
        return row


class IgnoresNamespaces(BlockManager):
    """Shows one tenant what another one computed."""

    def add(self, tokens, *, namespace=None):
        del namespace
        return super().add(tokens)


class LosesCopies(BlockManager):
    """Draws the block for copy-on-write, and never says that it has to be filled."""

    def allocate(self, rows, counts):
        moves = super().allocate(rows, counts)
        return Moves(moves.device_to_host, moves.host_to_device)


class FreesEarly(BlockManager):
    """Gives a block back that a table still names."""

    def confirm(self, rows):
        super().confirm(rows)
        self.release_held(self.table(rows[0])[-1:])


class KeepsPendingNodes(BlockManager):
    """A cancelled batch leaves its content in the cache."""

    def cancel(self, rows):
        self.confirm(rows)


class KeepsTablesTooLong(BlockManager):
    """Truncates to one block more than it was told."""

    def truncate(self, row, num_blocks):
        super().truncate(row, min(num_blocks + 1, len(self.table(row))))


class LeaksOnFree(BlockManager):
    """One reference of each row that ends stays."""

    def free(self, rows):
        for row in rows:
            self.hold(self.table(row)[:1])
        super().free(rows)


class ActsBeforeItChecks(BlockManager):
    """Draws for the first row before it knows whether there is room for all."""

    def allocate(self, rows, counts):
        try:
            return super().allocate(rows, counts)
        except OutOfBlocks:
            if self.num_available:
                self.reserve(rows[:1], [len(self.table(rows[0])) + 1])
            raise


class SwapsInTheWrongOrder(BlockManager):
    """Two blocks come back in each other's place."""

    def swap_in(self, rows):
        moves = super().swap_in(rows)
        pairs = moves.host_to_device.copy()
        pairs[:, 1] = pairs[::-1, 1]
        return Moves(moves.device_to_host, pairs, moves.device_to_device)


class EvictsTheNewest(BlockManager):
    """Forgets what was used last: everything else is freed and taken again, so that it looks newer."""

    def free(self, rows):
        super().free(rows)
        blocks = np.array(sorted((self.block_states() == 1).nonzero()[0].tolist()), np.int32)
        if len(blocks) > 1:
            self.hold(blocks)
            self.release_held(blocks)


MANAGER_FAULTS = [
    ForgetsHits,
    IgnoresNamespaces,
    LosesCopies,
    FreesEarly,
    KeepsPendingNodes,
    KeepsTablesTooLong,
    LeaksOnFree,
    ActsBeforeItChecks,
    SwapsInTheWrongOrder,
    EvictsTheNewest,
]


@pytest.mark.parametrize("fault", MANAGER_FAULTS)
def test_a_fault_in_the_manager_is_found(fault):
    class Machine(ManagerMachine):
        build = staticmethod(
            lambda world: fault(
                world.num_blocks, world.block_size, host_blocks=world.host_blocks, prefix_caching=world.prefix_caching
            )
        )

    assert found_by(Machine).found


class SchedulerWith(Scheduler):
    """A scheduler in which one thing is wrong."""


class LeaksOnAbort(SchedulerWith):
    """A block of whoever is aborted is never given back."""

    def abort(self, request_id):
        rows = self.rows_of(request_id) if self.status(request_id) == "running" else []
        for row in rows:
            self.manager.hold(self.manager.table(row)[:1])
        return super().abort(request_id)


class LosesMoves(SchedulerWith):
    """The engine is never told what to copy."""

    def schedule(self, now=0.0):
        batch = super().schedule(now)
        return batch if not len(batch.rows) else Altered(batch, moves=Moves())

    def update(self, batch, token_ids, counts=None, now=0.0):
        return super().update(getattr(batch, "original", batch), token_ids, counts, now)

    def cancel(self, batch, moved=False):
        super().cancel(getattr(batch, "original", batch), moved)


class WritesNextDoor(LosesMoves):
    """The last token of a batch goes to a neighbour's slot."""

    def schedule(self, now=0.0):
        batch = SchedulerWith.schedule(self, now)
        slots = batch.slot_mapping.copy()
        slots[-1:] = (slots[-1:] + 1) % (self.manager.num_blocks * self.manager.block_size)
        return batch if not len(batch.rows) else Altered(batch, slot_mapping=slots)


class DeliversTwice(SchedulerWith):
    """The first output of each update comes again."""

    def update(self, batch, token_ids, counts=None, now=0.0):
        outputs = list(super().update(batch, token_ids, counts, now))
        return [*outputs, *outputs[:1]]


class StopsTooLate(SchedulerWith):
    """Every request gets one token more than it asked for."""

    def add(self, request, now=0.0):
        super().add(msgspec.structs.replace(request, max_tokens=request.max_tokens + 1), now)


class ServesTheLatestFirst(SchedulerWith):
    """Whoever comes last stands first."""

    def add(self, request, now=0.0):
        super().add(request, now=-now)


class SharesNothing(SchedulerWith):
    """Nothing is ever found in the cache."""

    def __init__(self, manager, **limits):
        super().__init__(manager, **limits)
        self._number = 0

    def add(self, request, now=0.0):
        self._number += 1
        super().add(msgspec.structs.replace(request, extra_key=self._number), now)


class GetsStuck(SchedulerWith):
    """After a preemption, nothing is scheduled any more."""

    has_preempted = False

    def schedule(self, now=0.0):
        if self.has_preempted:
            self.policy  # noqa: B018 - the one thing that it still does
            return self.empty
        batch = super().schedule(now)
        if batch.is_empty:
            self.empty = batch
        self.has_preempted = bool(batch.preempted) and hasattr(self, "empty")
        return batch


class Altered:
    """A batch of which one array is another one."""

    def __init__(self, batch, **changes):
        self.original = batch
        self.changes = changes

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.original, name)


SCHEDULER_FAULTS = [
    LeaksOnAbort,
    LosesMoves,
    WritesNextDoor,
    DeliversTwice,
    StopsTooLate,
    ServesTheLatestFirst,
    SharesNothing,
    GetsStuck,
]


def builder_of(fault):
    return lambda world: build_scheduler(world, fault)


@pytest.mark.parametrize("fault", SCHEDULER_FAULTS)
def test_a_fault_in_the_scheduler_is_found_by_random_programs(fault):
    with pytest.raises(Violation):
        run_random_programs(builder_of(fault))


def run_random_programs(build):
    """Up to 300 programs of 60 calls; stops at the first violation."""
    for seed in range(300):
        random_program(seed, 60, build).drain()


@pytest.mark.parametrize("fault", [DeliversTwice, StopsTooLate])
def test_a_fault_in_the_scheduler_is_found_by_the_machine(fault):
    class Machine(SchedulerMachine):
        build = staticmethod(builder_of(fault))

    assert found_by(Machine).found


def found_by(machine):
    """The violation that a machine ends with; shrinking is left out, since any program will do."""
    how = settings(
        max_examples=300,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(Violation) as caught:
        run_state_machine_as_test(machine, settings=how)
    return caught.value
