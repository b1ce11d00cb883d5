"""The memory layer and the scheduler beside a naive model, through every call that there is, in any order.

After each call the kit recomputes the invariants (docs/invariants.md), compares with the dictionary model and with what every
KV slot holds, and at the end drains: everything has to finish and every block has to come back. `make campaign` runs the same
machines for as many examples as it is told.
"""

from collections import Counter

import pytest

from paged.testing.machines import ManagerMachine, SchedulerMachine, run_machine
from paged.testing.programs import RandomEngine, random_world
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.world import build_scheduler


def test_the_manager_agrees_with_the_naive_model_whatever_is_called():
    run_machine(ManagerMachine, few=150)


def test_the_scheduler_keeps_every_invariant_whatever_is_called():
    run_machine(SchedulerMachine, few=150)


@pytest.fixture(scope="module")
def events():
    """How often each kind of event occurs in 40 random programs of 60 calls."""
    import random

    total: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        rig = SchedulerRig(random_world(rng), build_scheduler)
        engine = RandomEngine(rig, rng, trouble=0.3)
        for _ in range(60):
            engine.do()
        rig.drain()
        total.update(rig.events)
    return total


@pytest.mark.parametrize(
    "event",
    ["hit", "switch", "swapped out", "swapped in", "preempted by swap", "preempted by recompute", "append", "load"],
)
def test_small_worlds_are_dense_in_what_matters(events, event):
    assert events[event] >= 5, dict(events)
