"""Order by what is cached: who finds most of its prompt comes first, and passes none that came more than the lead before it."""

from paged import BlockManager, Policy, Request, Scheduler

from ..driving import steps_of  # noqa: TID252

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
    return [name for batch in steps_of(scheduler, now=now) for name in batch.admitted]


def add(scheduler, id, prompt, now=0.0, **fields):
    scheduler.add(Request(id=id, prompt=prompt, max_tokens=1, **fields), now)


def test_who_finds_most_cached_comes_first_and_others_as_they_came():
    scheduler = scheduler_with(FIRST, SECOND)
    add(scheduler, "reads none", FIRST, reads_cache=False)
    add(scheduler, "none, later", [4] * 24)
    add(scheduler, "a part", SECOND[:12] + [5] * 12)
    add(scheduler, "most", FIRST)
    expected = ["most", "a part", "reads none", "none, later"]
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


def test_what_was_evicted_while_it_waited_counts_no_more():
    scheduler = scheduler_with(SECOND)
    add(scheduler, "half", SECOND[:12] + [5] * 12)
    add(scheduler, "gone", SECOND)
    assert scheduler.next_id == "gone"
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
