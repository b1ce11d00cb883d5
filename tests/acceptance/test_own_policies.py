"""Policies of one's own: strategies that a policy brings along, names by which it is known, and strategies that differ in one word."""

import pytest

from paged import POLICIES, BlockManager, Policy, Request, Scheduler, register_policy
from paged.errors import InvalidConfig
from paged.scheduler import Order, Victims


class ShortestFirst(Order):
    def key_of(self, request, arrival, number):
        return (len(request.prompt), arrival, number)


class EarliestGives(Victims):
    def ranked(self, state, running):
        return running[::-1]


def with_order(policy, usual, num_blocks):
    return usual._replace(order=ShortestFirst())


def with_victims(policy, usual, num_blocks):
    return usual._replace(victims=EarliestGives(takes_whole=True, swaps=lambda *_: False))


def test_an_order_of_ones_own_decides_who_comes_first(make_scheduler, request_of):
    scheduler = make_scheduler(10, 4, policy=Policy(name="mine", strategies=with_order), max_sequences=1)
    scheduler.add(request_of("long", 8))
    scheduler.add(request_of("short", 2))
    assert scheduler.schedule().admitted == ("short",)


@pytest.mark.parametrize(("strategies", "victim"), [(None, "c"), (with_victims, "b")])
def test_victims_of_ones_own_decide_who_gives(make_scheduler, request_of, strategies, victim):
    scheduler = make_scheduler(3, 4, policy=Policy(name="mine", strategies=strategies), prefix_caching=False)
    for name in ("a", "b", "c"):
        scheduler.add(request_of(name, 4, max_tokens=4))
    batch = scheduler.schedule()
    scheduler.update(batch, [7, 7, 7])
    # Each needs another block now. The first in order is never its own victim.
    assert scheduler.schedule().preempted[0] == (victim, "recompute")


def test_a_policy_that_is_registered_has_a_name_and_takes_no_other_ones(make_scheduler):
    mine, before = Policy(name="mine"), dict(POLICIES)
    with pytest.raises(InvalidConfig, match="there is a policy vllm already"):
        register_policy(Policy(name="vllm", watermark=0.5))
    assert before == POLICIES
    register_policy(mine)
    try:
        assert make_scheduler(10, 4, policy="mine").policy is mine
    finally:
        del POLICIES["mine"]


def test_a_modelled_system_that_is_not_imported_is_told_by_what_it_comes(run_python):
    told = run_python("-c", "from paged import *\nScheduler(BlockManager(8, 4), policy='static')").stderr
    assert 'UnknownPolicy: unknown policy "static"' in told and "import paged.study" in told


@pytest.mark.parametrize(("strategy", "first"), [("latest", "long"), ("fewest_blocks", "short")])
def test_a_step_that_would_compute_nothing_asks_the_latest_first_or_the_one_with_the_fewest_blocks(strategy, first):
    policy = Policy(name="mine", victim=strategy, take="whole", preemption="recompute")
    scheduler = Scheduler(BlockManager(8, 1, prefix_caching=False), policy=policy)
    scheduler.add(Request(id="short", prompt=[2, 2], max_tokens=6))
    scheduler.add(Request(id="long", prompt=[3, 3, 3, 3], max_tokens=3))
    # Told no token, both wait for append(), and hold six of the eight blocks.
    scheduler.update(scheduler.schedule(), [], [0, 0])
    scheduler.add(Request(id="new", prompt=[4, 4, 4, 4], max_tokens=1))
    batch = scheduler.schedule()
    assert (batch.preempted, batch.admitted) == (((first, "recompute"),), ("new",))
