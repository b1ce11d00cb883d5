"""Order by what is cached: who finds most of its prompt comes first, and passes none that came more than the lead before it."""

import random

import numpy as np
import pytest

from paged import POLICIES, BlockManager, Policy, Request, Scheduler
from paged.errors import InvalidConfig
from paged.testing import SchedulerRig, World
from paged.testing.programs import RandomEngine

FIRST, SECOND, OTHER = [1] * 24, [2] * 24, [3] * 24


def scheduler_with(*cached, lead=10.0, **fields):
    """One seat, and these prompts in the cache."""
    policy = Policy(name="cached", order="cached", max_lead=lead, **fields)
    scheduler = Scheduler(BlockManager(24, 4), policy=policy, max_sequences=1)
    for number, prompt in enumerate(cached):
        scheduler.add(Request(id=f"before {number}", prompt=prompt, max_tokens=1))
        run(scheduler)
    return scheduler


def run(scheduler, now=0.0):
    """Admit in order, to the end; return who came in."""
    admitted = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule(now)
        admitted += batch.admitted
        scheduler.update(batch, np.full(int(batch.samples.sum()), 7, np.int32), now=now)
        assert scheduler.check() == []
    return admitted


def add(scheduler, id, prompt, now=0.0, **fields):
    scheduler.add(Request(id=id, prompt=prompt, max_tokens=1, **fields), now)


def test_who_finds_most_cached_comes_first_and_others_as_they_came():
    scheduler = scheduler_with(FIRST, SECOND)
    add(scheduler, "none", OTHER)
    add(scheduler, "none, later", [4] * 24)
    add(scheduler, "a part", SECOND[:12] + [5] * 12)
    add(scheduler, "most", FIRST)
    expected = ["most", "a part", "none", "none, later"]
    assert scheduler.waiting_ids() == expected
    assert scheduler.next_id == "most"
    assert 'behind 1 request in the queue, the first of which is "most"' in scheduler.explain("a part").reason
    assert run(scheduler) == expected


def test_one_that_came_later_than_the_lead_passes_none():
    scheduler = scheduler_with(FIRST)
    add(scheduler, "none", OTHER, now=0.0)
    add(scheduler, "within", FIRST, now=10.0)
    add(scheduler, "too late", FIRST, now=10.5)
    assert run(scheduler, now=11.0) == ["within", "none", "too late"]


def test_priority_is_before_all_of_this():
    scheduler = scheduler_with(FIRST)
    add(scheduler, "cached", FIRST)
    add(scheduler, "urgent", OTHER, priority=-1)
    assert run(scheduler) == ["urgent", "cached"]


def test_a_request_that_does_not_read_the_cache_finds_nothing_in_it():
    scheduler = scheduler_with(FIRST)
    add(scheduler, "reads none", FIRST, reads_cache=False)
    add(scheduler, "reads", FIRST)
    assert run(scheduler) == ["reads", "reads none"]


def test_what_was_evicted_while_it_waited_counts_no_more():
    scheduler = scheduler_with(FIRST, SECOND)
    add(scheduler, "whole", FIRST)
    add(scheduler, "half", SECOND[:12] + [5] * 12)
    assert scheduler.next_id == "whole"
    scheduler.manager.reset_cache()
    assert scheduler.waiting_ids() == ["whole", "half"]
    scheduler = scheduler_with(SECOND)
    add(scheduler, "half", SECOND[:12] + [5] * 12)
    add(scheduler, "gone", SECOND)
    scheduler.manager.reset_cache()
    assert run(scheduler) == ["half", "gone"]


def test_what_left_the_device_counts_where_the_host_has_it():
    policy = Policy(name="cached", order="cached", max_lead=10.0)
    manager = BlockManager(10, 4, host_blocks=20, host_caching=True)
    scheduler = Scheduler(manager, policy=policy, max_sequences=1)
    for number, prompt in enumerate((FIRST, SECOND)):
        add(scheduler, f"before {number}", prompt)
        run(scheduler)
    assert manager.lookup(FIRST).num_tokens < 20 <= manager.lookup(FIRST).num_tokens + manager.lookup(FIRST).host_tokens
    add(scheduler, "none", OTHER)
    add(scheduler, "on the host", FIRST)
    assert run(scheduler) == ["on the host", "none"]


def test_turns_that_go_on_in_turn_hit_where_arrival_order_evicts_all():
    """Three sessions of which the memory holds one: in order of arrival each turn evicts what the next one needs."""

    def hits(policy):
        scheduler = Scheduler(BlockManager(20, 4), policy=policy, max_sequences=1)
        for session in range(3):
            add(scheduler, f"{session}/0", [session] * 40)
        now = 0.0
        while scheduler.has_unfinished:
            batch = scheduler.schedule(now)
            for output in scheduler.update(batch, np.full(int(batch.samples.sum()), 7, np.int32), now=now):
                session, turn = map(int, output.id.split("/"))
                if turn < 4:
                    add(scheduler, f"{session}/{turn + 1}", [session] * (44 + 4 * turn), now=now)
            now += 1.0
        return scheduler.stats().hit_tokens

    assert hits("vllm") == 0
    assert hits(POLICIES["paged-cached"]) > 300


# Seed 2 takes longer than all others together.
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_whatever_is_called_no_request_waits_for_ones_beyond_the_lead(seed):
    world = World(num_blocks=12, block_size=2, host_blocks=6, max_sequences=3, policy="paged-cached", max_lead=3.0)
    rig = SchedulerRig(world)
    clients = RandomEngine(rig, random.Random(seed))
    while rig.num_added < 40:
        clients.do()
    rig.drain()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"order": "cached"}, "order cached needs max_lead, and no other order takes it; got None with order cached"),
        ({"max_lead": 3.0}, "got 3.0 with order priority"),
        ({"order": "cached", "max_lead": -1.0}, "max_lead has to be a finite number of at least 0, or None; got -1.0"),
        ({"order": "cached", "max_lead": float("inf")}, "max_lead has to be a finite number"),
    ],
)
def test_a_lead_goes_with_this_order_alone(fields, words):
    with pytest.raises(InvalidConfig, match=words):
        Policy(name="mine", **fields)
