"""Faults of subjects that are not ours but stand behind `build`: each is one way to get memory or decisions wrong, and has to be found.

Faults in our own sources are described in tests/faults/faults.toml; `make faults` tries them all.
"""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from paged import POLICIES, BlockManager, Hint, HintOutcome, Request, RequestUsage, Scheduler
from paged.errors import DuplicateRequest, NeverFits, OutOfBlocks, UnknownRequest
from paged.scheduler.hints import Hints
from paged.testing import SchedulerRig, Violation, World, random_program, replay
from paged.testing.machines import ManagerMachine, first_violation, settings_for
from paged.testing.world import build_scheduler


class ActsBeforeItChecks(BlockManager):
    """Draws for the first row before it knows whether there is room for all."""

    def allocate(self, rows, counts, **unknown):
        try:
            return super().allocate(rows, counts, **unknown)
        except OutOfBlocks:
            if self.num_available:
                self.reserve(rows[:1], [len(self.table(rows[0])) + 1])
            raise


class EvictsTheNewest(BlockManager):
    """Forgets what was used last: everything else is freed and taken again, so that it looks newer."""

    def free(self, rows):
        super().free(rows)
        blocks = np.array(sorted((self.block_states() == 1).nonzero()[0].tolist()), np.int32)
        if len(blocks) > 1:
            self._memory.device.keep(blocks)
            self._memory.device.let_go(blocks)


@pytest.mark.parametrize("fault", [ActsBeforeItChecks, EvictsTheNewest])
def test_a_fault_in_the_manager_is_found(fault):
    class Machine(ManagerMachine):
        @staticmethod
        def build(world):
            sizes = world.num_blocks, world.block_size
            return fault(*sizes, host_blocks=world.host_blocks, prefix_caching=world.prefix_caching)

    # It is not made short: any program will do.
    violation, _ = first_violation(Machine, settings_for(300, steps=40))
    assert violation.found


def raising(what):
    def fail(*_, **__):
        raise KeyError(what)

    return fail


def test_what_is_raised_when_an_example_ends_does_not_hide_what_ended_it():
    wrong = {"allocate": raising("the first"), "free": raising("the one behind it")}

    class Machine(ManagerMachine):
        build = staticmethod(lambda world: type("Fails", (BlockManager,), wrong)(world.num_blocks, world.block_size))

    violation, _ = first_violation(Machine, settings_for(20))
    assert [sentence.partition(" (")[0] for sentence in violation.found] == ["raised KeyError: 'the first'"]


class WritesNextDoor(Scheduler):
    """The last token of a batch goes to a neighbour's slot."""

    def schedule(self, now=0.0):
        batch = super().schedule(now)
        batch.slot_mapping[-1:] = (batch.slot_mapping[-1:] + 1) % (self.manager.num_blocks * self.manager.block_size)
        return batch


class DeliversTwice(Scheduler):
    """The first output of each update comes again."""

    def update(self, batch, token_ids, counts=None, now=0.0):
        outputs = list(super().update(batch, token_ids, counts, now))
        return [*outputs, *outputs[:1]]


class SharesNothing(Scheduler):
    """Nothing is ever found in the cache."""

    def add(self, request, now=0.0):
        super().add(msgspec.structs.replace(request, extra_key=request.id), now)


class GetsStuck(Scheduler):
    """After a preemption, nothing is scheduled any more."""

    has_preempted = False

    def schedule(self, now=0.0):
        if self.has_preempted:
            return self.empty
        batch = super().schedule(now)
        if batch.is_empty:
            self.empty = batch
        self.has_preempted = bool(batch.preempted) and hasattr(self, "empty")
        return batch


def counting(name, factor):
    """A scheduler that says so many times what it counted."""

    class Counts(Scheduler):
        def stats(self):
            shown = super().stats()
            setattr(shown, name, factor * getattr(shown, name))
            return shown

    return Counts


def saying(**fields):
    """A scheduler that says another policy than it follows."""

    class Says(Scheduler):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.policy = msgspec.structs.replace(self.policy, **fields)

    return Says


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (WritesNextDoor, "."),
        (DeliversTwice, "."),
        (GetsStuck, "."),
        (counting("recomputed_tokens", 0), r"stats\(\): recomputed_tokens 0; \d+ were computed in batches before"),
    ],
)
def test_a_fault_in_the_scheduler_is_found_by_random_programs(fault, told):
    with pytest.raises(Violation, match=told):
        run_programs(lambda world: build_scheduler(world, fault))


def run_programs(build):
    for seed in range(300):
        random_program(seed, 60, build).drain()


WORLD = World(num_blocks=8, block_size=1, max_tokens_per_step=32, policy="fastgen", watermark=0.5)
WITHOUT_WATERMARK = replace(WORLD, watermark=0.0)
FEWEST = msgspec.structs.replace(POLICIES["fastgen"], victim="fewest_blocks")


def gives_way_from_the_middle(world):
    return saying(victim="latest")(BlockManager(6, 1), policy=FEWEST)


def lets_one_more_wait(world):
    return build_scheduler(replace(world, max_waiting=2))


@pytest.mark.parametrize(
    ("fault", "world", "lengths", "told"),
    [
        (counting("steps", 2), WORLD, (2,), r"stats\(\): steps 2, counted from its batches 1"),
        (saying(watermark=0.0), WORLD, (2, 3), "10: r1 waits for 3 blocks; 6 are left, 0 owed, 0 kept free"),
        (saying(watermark=0.5), WITHOUT_WATERMARK, (2, 3), r"10: \['r0', 'r1'\] came in; 3 blocks are left, 0 owed, 4 kept free"),
        (SharesNothing, World(num_blocks=8, block_size=1), (3, 3), "r1/0 begins at 0, though its first 2 tokens are there"),
        (gives_way_from_the_middle, replace(WITHOUT_WATERMARK, num_blocks=6), (1, 1, 3), r"11: r1 gave way, and \['r2'\] behind it run on"),
        (lets_one_more_wait, replace(WORLD, max_waiting=1), (1, 1), "r1 was taken, and 1 waited already: no more may"),
    ],
)  # fmt: skip
def test_totals_admission_hits_and_victims_have_to_be_what_batches_and_policy_say(fault, world, lengths, told):
    with pytest.raises(Violation, match=told):
        serve(fault, world, lengths)


def serve(fault, world, lengths):
    rig = SchedulerRig(world, lambda world: build_scheduler(world, fault) if isinstance(fault, type) else fault(world))
    for number, length in enumerate(lengths):
        prompt = [0 if fault is SharesNothing else number] * length
        rig.add(Request(id=f"r{number}", prompt=prompt, max_tokens=4 if len(lengths) == 3 else 1))
    rig.drain()


def ending_with(**wrong):
    """A scheduler whose last output of a request that is aborted, or finished by the engine, is another one."""

    class Ends(Scheduler):
        def abort(self, request_id):
            return msgspec.structs.replace(super().abort(request_id), **wrong)

        def finish(self, *arguments):
            return msgspec.structs.replace(super().finish(*arguments), **wrong)

    return Ends


class Refuses(Scheduler):
    """Refuses by the wrong errors, or not at all."""

    def add(self, request, now=0.0):
        try:
            super().add(request, now)
        except DuplicateRequest as error:
            raise NeverFits("no room", needed=1, limit=0, unit="blocks") from error

    def finish(self, *arguments):
        raise RuntimeError("lost")

    def hint(self, hint, now=0.0):
        try:
            return super().hint(hint, now)
        except UnknownRequest:
            return HintOutcome(status="missing", reason="nobody")


ONE_MORE, MUCH_MORE = ending_with(token_ids=[0]), ending_with(usage=RequestUsage(1, 1, 0, 0, 0, 1))
ADDED = ("add", (Request(id="a", prompt=[0], max_tokens=2),))


@pytest.mark.parametrize(
    ("fault", "call", "told"),
    [
        (ONE_MORE, ("abort", ("a",)), r"abort of live a returned Output\(id='a', sequence=0, token_ids=\[0\]"),
        (
            MUCH_MORE,
            ("abort", ("a",)),
            "a reports output_tokens 1; there were 0\na reports preemptions 1; there were 0",
        ),
        (ONE_MORE, ("finish", ("a",)), r"finish of a/0 returned Output\(id='a', sequence=0, token_ids=\[0\]"),
        (Refuses, ADDED, "a is taken, and was refused as never fitting, not as a duplicate"),
        (Refuses, ("finish", ("a",)), r"raised RuntimeError: lost \(finish line"),
        (
            Refuses,
            ("hint", (Hint(action="retain", request="b"),)),
            "b was never submitted, and hint answers HintOutcome",
        ),
    ],
)
def test_a_call_that_is_answered_wrong_is_told_with_its_program(fault, call, told):
    with pytest.raises(Violation, match=told) as caught:
        replay(World(), [ADDED, call], lambda world: build_scheduler(world, fault))
    assert caught.value.program.calls[-1][0] == call[0]


def pin_beside(self, hint, *rest, pin=Hints._pin):
    before = self.pins
    outcome = pin(self, hint, *rest)
    self.pins = before + self.pins[-1:]
    return outcome


def fetch_one(self, fetch=Hints.fetch):
    del self.to_fetch[1:]
    fetch(self)


def unpin_of_all(self, target, *tenants, unpin=Hints._unpin):
    return unpin(self, target)


SERVED = [ADDED, *[("step", ())] * 2]
OTHERS = Request(id="b", prompt=[1, 1], max_tokens=1), Request(id="c", prompt=[2] * 5, max_tokens=1, writes_cache=False)
GONE = [*SERVED, *(call for request in OTHERS for call in (("add", (request,)), ("step", ())))]
FETCHED = [("hint", (Hint(action="prefetch", tokens=[token] * 2),)) for token in (0, 1)]
PINNED = [("hint", (Hint(action="pin", tokens=[0], tenant=tenant),)) for tenant in ("t", None)]
PINNED_AT_ITS_END = ("hint", (Hint(action="pin", request="a"),))


@pytest.mark.parametrize(
    ("method", "wrong", "calls", "told"),
    [
        ("_pin", pin_beside, [*SERVED, PINNED[0], PINNED[0]], "says that 2 blocks are pinned; 1 are"),
        ("_unpin", unpin_of_all, [*SERVED, *PINNED], "says that 1 blocks are pinned; 2 are"),
        ("finish", lambda *_: None, [ADDED, PINNED_AT_ITS_END, *SERVED[1:]], "says that 0 blocks are pinned; 2 are"),
        ("fetch", fetch_one, [*GONE, *FETCHED, ("schedule", ())], "1 blocks were to be prefetched, and are not"),
    ],
)
def test_what_a_hint_leaves_undone_is_told(monkeypatch, method, wrong, calls, told):
    sizes = {"num_blocks": 6, "block_size": 1, "host_blocks": 8, "host_caching": True}
    world = World(max_pinned=0 if method == "fetch" else 2, **sizes)
    assert replay(world, calls)
    monkeypatch.setattr(Hints, method, wrong)
    with pytest.raises(Violation, match=told):
        replay(world, calls)
