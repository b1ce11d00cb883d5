"""What is counted, and how often: a lookup counts when its request is admitted, once, and not at all where nothing is looked up."""

from __future__ import annotations


def counted(scheduler):
    """(queries, their tokens, what they found) so far."""
    stats = scheduler.manager.stats()
    return stats.queries, stats.query_tokens, stats.hit_tokens


def test_O2_a_request_that_had_to_wait_is_one_query(make_scheduler, request_of, step):
    scheduler = make_scheduler(10, 4)
    scheduler.add(request_of("first", 28, max_tokens=5))
    step(scheduler)
    before = counted(scheduler)
    scheduler.add(request_of("waits", 32, max_tokens=1))
    for _ in range(3):
        assert "waits" not in step(scheduler).tokens
    assert counted(scheduler) == before
    while "waits" not in step(scheduler).tokens:
        pass
    assert counted(scheduler) == (before[0] + 1, before[1] + 32, before[2])


def test_O3_a_hit_that_was_refused_at_first_counts_once(make_scheduler, request_of, step):
    scheduler = make_scheduler(13, 4)
    shared = list(range(32))
    scheduler.add(request_of("cached", [*shared, 900], max_tokens=1))
    step(scheduler)
    # Its blocks and what is cached leave no room for 48 tokens more.
    scheduler.add(request_of("holds", 12, max_tokens=4))
    step(scheduler)
    before = counted(scheduler)
    scheduler.add(request_of("hits", [*shared, *range(500, 516)], max_tokens=1))
    assert "hits" not in step(scheduler).tokens
    assert counted(scheduler) == before
    while "hits" not in step(scheduler).tokens:
        pass
    assert [now - then for now, then in zip(counted(scheduler), before, strict=True)] == [1, 48, 32]


def test_O5_with_the_cache_off_nothing_is_a_query(make_scheduler, request_of, step):
    scheduler = make_scheduler(12, 4, prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add(request_of(name, list(range(16)), max_tokens=1))
        step(scheduler)
    assert counted(scheduler) == (0, 0, 0)
    assert scheduler.manager.stats().hit_rate == 0
