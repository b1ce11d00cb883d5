"""What the rig holds a scheduler to beside its batches: its totals, whom it lets in, and how many may wait."""

from dataclasses import replace

import msgspec
import pytest

from paged import POLICIES, BlockManager, Request, Scheduler
from paged.testing import SchedulerRig, Violation, World, random_program
from paged.testing.world import build_scheduler


class CountsNothingAgain(Scheduler):
    """Forgets what it computed twice."""

    def stats(self):
        shown = super().stats()
        shown.recomputed_tokens = 0
        return shown


class CountsStepsTwice(Scheduler):
    """Says twice the steps."""

    def stats(self):
        shown = super().stats()
        shown.steps *= 2
        return shown


class SaysAnotherWatermark(Scheduler):
    """Keeps more, or less, free than its policy says."""

    said = 0.0

    @property
    def policy(self):
        return msgspec.structs.replace(super().policy, watermark=self.said)


class SaysMore(SaysAnotherWatermark):
    said = 0.5


WORLD = World(num_blocks=8, block_size=1, max_tokens_per_step=32, policy="fastgen", watermark=0.5)


def prompts(rig, *lengths):
    for number, length in enumerate(lengths):
        rig.add(Request(id=f"r{number}", prompt=[number % 3] * length, max_tokens=1))


def test_tokens_that_are_computed_again_have_to_be_counted():
    with pytest.raises(Violation, match=r"stats\(\): recomputed_tokens 0; \d+ were computed in batches before"):
        run_programs(lambda world: build_scheduler(world, CountsNothingAgain))


def run_programs(build):
    for seed in range(100):
        random_program(seed, 60, build)


def test_totals_have_to_be_those_of_the_batches():
    rig = SchedulerRig(WORLD, lambda world: build_scheduler(world, CountsStepsTwice))
    prompts(rig, 2)
    with pytest.raises(Violation, match=r"stats\(\): steps 2, counted from its batches 1"):
        rig.drain()


def test_the_first_that_waits_has_to_come_in_when_it_fits_beside_the_watermark():
    rig = SchedulerRig(WORLD, lambda world: build_scheduler(world, SaysAnotherWatermark))
    prompts(rig, 2, 3)
    with pytest.raises(Violation, match="10: r1 waits for 3 blocks; 6 are left, 0 owed, 0 kept free"):
        rig.schedule()


def test_whoever_comes_in_leaves_the_watermark():
    rig = SchedulerRig(replace(WORLD, watermark=0.0), lambda world: build_scheduler(world, SaysMore))
    prompts(rig, 2, 3)
    with pytest.raises(Violation, match=r"10: \['r0', 'r1'\] came in; 3 blocks are left, 0 owed, 4 kept free"):
        rig.schedule()


def test_no_more_may_wait_than_the_limit_says():
    rig = SchedulerRig(replace(WORLD, max_waiting=1), lambda world: build_scheduler(replace(world, max_waiting=2)))
    with pytest.raises(Violation, match="r1 was taken, and 1 waited already: no more may"):
        prompts(rig, 1, 1)


def test_requests_that_come_in_a_row_come_at_the_same_time():
    rig = SchedulerRig(WORLD)
    prompts(rig, 1, 1)
    assert rig.now == 0.0
    rig.schedule()
    assert rig.now == 1.0


class SaysTheLatestGivesWay(Scheduler):
    """Takes blocks from whoever holds the fewest, and says otherwise."""

    @property
    def policy(self):
        return msgspec.structs.replace(super().policy, victim="latest")


def test_nobody_runs_on_behind_one_that_gave_way():
    world = World(num_blocks=6, block_size=1, policy="fastgen")
    fewest = msgspec.structs.replace(POLICIES["fastgen"], victim="fewest_blocks")

    def build(world):
        return SaysTheLatestGivesWay(BlockManager(world.num_blocks, world.block_size), policy=fewest)

    rig = SchedulerRig(world, build)
    for name, length in (("r0", 1), ("r1", 1), ("r2", 3)):
        rig.add(Request(id=name, prompt=[int(name[1]) % 3] * length, max_tokens=4))
    with pytest.raises(Violation, match=r"11: r1 gave way, and \['r2'\] behind it run on"):
        rig.drain()
