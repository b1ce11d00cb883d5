"""A policy is data: a strategy that differs in one word decides differently."""

import pytest

from paged import BlockManager, Policy, Request, Scheduler


def first_victim(strategy: str) -> str:
    policy = Policy(name="mine", victim=strategy, take="whole", preemption="recompute")
    scheduler = Scheduler(BlockManager(8, 1, prefix_caching=False), policy=policy)
    scheduler.add(Request(id="old", prompt=[1, 1], max_tokens=6))
    scheduler.add(Request(id="short", prompt=[2], max_tokens=6))
    scheduler.add(Request(id="long", prompt=[3, 3, 3, 3], max_tokens=3))
    while True:
        batch = scheduler.schedule()
        if batch.preempted:
            return batch.preempted[0][0]
        scheduler.update(batch, [7] * int(batch.samples.sum()))
        assert scheduler.check() == []


@pytest.mark.parametrize(("strategy", "first"), [("latest", "long"), ("fewest_blocks", "short")])
def test_the_latest_in_order_or_the_one_with_the_fewest_blocks_gives_way_first(strategy, first):
    assert first_victim(strategy) == first


@pytest.mark.parametrize(("strategy", "first"), [("latest", "long"), ("fewest_blocks", "short")])
def test_a_step_that_would_compute_nothing_asks_the_same_victims_first(strategy, first):
    policy = Policy(name="mine", victim=strategy, take="whole", preemption="recompute")
    scheduler = Scheduler(BlockManager(8, 1, prefix_caching=False), policy=policy)
    scheduler.add(Request(id="short", prompt=[2, 2], max_tokens=6))
    scheduler.add(Request(id="long", prompt=[3, 3, 3, 3], max_tokens=3))
    # Told no token, both wait for append(), and hold six of the eight blocks.
    scheduler.update(scheduler.schedule(), [], [0, 0])
    scheduler.add(Request(id="new", prompt=[4, 4, 4, 4], max_tokens=1))
    batch = scheduler.schedule()
    assert (batch.preempted, batch.admitted) == (((first, "recompute"),), ("new",))


def test_a_victim_in_the_middle_leaves_its_place_to_those_behind_it(make_scheduler, step):
    fewest = Policy(name="fewest blocks", victim="fewest_blocks")
    scheduler = make_scheduler(7, 4, {"a": 8, "small": 4, "large": 12}, policy=fewest, prefix_caching=False)
    step(scheduler)
    # Each needs a block more, and one is free: the small one wants none and gives one.
    second = step(scheduler)
    assert second.batch.preempted == (("small", "recompute"),)
    assert second.tokens == {"a": 1, "large": 1}
