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


def saying(**fields):
    """A scheduler that says another policy than it follows."""

    class Says(Scheduler):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.policy = msgspec.structs.replace(self.policy, **fields)

    return Says


WORLD = World(num_blocks=8, block_size=1, max_tokens_per_step=32, policy="fastgen", watermark=0.5)


def prompts(rig, *lengths, max_tokens=1):
    for number, length in enumerate(lengths):
        rig.add(Request(id=f"r{number}", prompt=[number % 3] * length, max_tokens=max_tokens))


def test_tokens_that_are_computed_again_have_to_be_counted():
    with pytest.raises(Violation, match=r"stats\(\): recomputed_tokens 0; \d+ were computed in batches before"):
        run_programs(lambda world: build_scheduler(world, CountsNothingAgain))


def run_programs(build):
    for seed in range(100):
        random_program(seed, 60, build)


@pytest.mark.parametrize(
    ("fault", "world", "lengths", "told"),
    [
        (CountsStepsTwice, WORLD, (2,), r"stats\(\): steps 2, counted from its batches 1"),
        (saying(watermark=0.0), WORLD, (2, 3), "10: r1 waits for 3 blocks; 6 are left, 0 owed, 0 kept free"),
        (
            saying(watermark=0.5),
            replace(WORLD, watermark=0.0),
            (2, 3),
            r"10: \['r0', 'r1'\] came in; 3 blocks are left, 0 owed, 4 kept free",
        ),
    ],
)
def test_totals_and_admission_have_to_be_what_batches_and_policy_say(fault, world, lengths, told):
    rig = SchedulerRig(world, lambda world: build_scheduler(world, fault))
    prompts(rig, *lengths)
    with pytest.raises(Violation, match=told):
        rig.drain()


def test_nobody_runs_on_behind_one_that_gave_way():
    fewest = msgspec.structs.replace(POLICIES["fastgen"], victim="fewest_blocks")
    world = World(num_blocks=6, block_size=1, policy="fastgen")
    rig = SchedulerRig(world, lambda world: saying(victim="latest")(BlockManager(6, 1), policy=fewest))
    prompts(rig, 1, 1, 3, max_tokens=4)
    with pytest.raises(Violation, match=r"11: r1 gave way, and \['r2'\] behind it run on"):
        rig.drain()


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
