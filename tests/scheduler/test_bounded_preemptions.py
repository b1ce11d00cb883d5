"""A request that was preempted as often as its policy allows comes back with its worst case reserved, and keeps it."""

import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Policy, Request, Scheduler

from ..driving import step, steps_of  # noqa: TID252

DROPS_ALL = Policy(name="drops all", max_preemptions=1)
TAKES_TAILS = Policy(name="takes tails", max_preemptions=1, take="tail")


def scheduler_with_one_preempted(policy, num_blocks=6):
    """Blocks of four: "a" ends with its third token, "b" was preempted for its second, and both had 12 prompt tokens."""
    scheduler = Scheduler(BlockManager(num_blocks, 4, prefix_caching=False), policy=policy)
    scheduler.add(Request(id="a", prompt=[1] * 12, max_tokens=3))
    scheduler.add(Request(id="b", prompt=[2] * 12, max_tokens=9))
    step(scheduler)
    assert step(scheduler).preempted == (("b", "recompute"),)
    return scheduler


@pytest.mark.parametrize("policy", [DROPS_ALL, TAKES_TAILS], ids=lambda policy: policy.name)
def test_newcomers_wait_for_what_its_worst_case_reserves(policy):
    scheduler = scheduler_with_one_preempted(policy)
    assert step(scheduler).preempted == ()
    assert scheduler.status("a") == "finished"
    # "b" may need all six blocks, and holds four or fewer: two are available, and are not there for "c".
    scheduler.add(Request(id="c", prompt=[3], max_tokens=1))
    while scheduler.status("b") != "finished":
        assert step(scheduler).ids.tolist() == ["b"]
    assert scheduler.status("c") == "waiting"
    assert step(scheduler).ids.tolist() == ["c"]


def test_others_do_not_grow_into_what_its_worst_case_reserves():
    scheduler = scheduler_with_one_preempted(DROPS_ALL, num_blocks=7)
    step(scheduler)
    scheduler.add(Request(id="c", prompt=[3] * 4, max_tokens=8))
    # Of seven blocks "b" may need six.
    assert step(scheduler).ids.tolist() == ["b", "c"]
    while "b" in step(scheduler).ids:
        assert scheduler.manager.rows.num_blocks[scheduler.rows_of("c")].sum() <= 1
    assert scheduler.status("b") == "finished"


@pytest.mark.parametrize("policy", [DROPS_ALL, TAKES_TAILS], ids=lambda policy: policy.name)
def test_it_is_no_victim_again(policy):
    scheduler = scheduler_with_one_preempted(policy)
    for _ in range(2):
        step(scheduler)
    scheduler.add(Request(id="urgent", prompt=[3] * 4, max_tokens=8, priority=-1))
    steps_of(scheduler)
    assert scheduler.stats().preemptions == 1


def test_it_gives_way_all_the_same_while_it_waits_for_its_caller():
    scheduler = scheduler_with_one_preempted(DROPS_ALL)
    step(scheduler)
    batch = scheduler.schedule()
    assert batch.ids.tolist() == ["b"]
    scheduler.update(batch, [], counts=[0])
    # "b" holds four of the six blocks.
    scheduler.add(Request(id="c", prompt=[3] * 16, max_tokens=1))
    assert step(scheduler).ids.tolist() == ["c"]
    scheduler.append("b", [8])
    assert step(scheduler).ids.tolist() == ["b"]


def test_a_group_comes_back_when_the_worst_cases_of_all_its_sequences_fit():
    scheduler = Scheduler(BlockManager(6, 4, prefix_caching=False), policy=DROPS_ALL)
    scheduler.add(Request(id="a", prompt=[1] * 12, max_tokens=3))
    scheduler.add(Request(id="small", prompt=[2], max_tokens=7))
    scheduler.add(Request(id="group", prompt=[3] * 4, max_tokens=6, num_sequences=2))
    step(scheduler)
    assert step(scheduler).preempted == (("group", "recompute"),)
    said = "It was preempted 1 time and will compute 8 tokens again. It re-enters only with its worst case reserved."
    assert said in str(scheduler.explain("group"))
    # Two blocks for what each sequence knows would do once "a" has ended; three may be needed, of six.
    while scheduler.status("small") != "finished":
        assert "group" not in step(scheduler).ids
    assert step(scheduler).admitted == ("group",)
    steps_of(scheduler)
    assert scheduler.stats().preemptions == 1


def test_what_it_reserves_is_counted_once_while_it_computes_its_prompt():
    scheduler = Scheduler(BlockManager(7, 4, prefix_caching=False), policy=DROPS_ALL, max_chunk=4)
    scheduler.add(Request(id="a", prompt=[1] * 12, max_tokens=3))
    scheduler.add(Request(id="b", prompt=[2] * 12, max_tokens=9))
    while scheduler.status("a") != "finished":
        step(scheduler)
    assert scheduler.stats().preemptions == 1
    while scheduler.status("b") == "waiting":
        step(scheduler)
    # In the middle of its prompt "b" may need six blocks in all, and the seventh is there for "c".
    assert scheduler.manager.device.num_used == 1
    scheduler.add(Request(id="c", prompt=[3], max_tokens=1))
    assert step(scheduler).ids.tolist() == ["b", "c"]
