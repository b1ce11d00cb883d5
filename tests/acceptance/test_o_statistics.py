"""What is counted, and how often: a lookup counts when its request is admitted, once, and not at all where nothing is looked up."""

import pytest

from paged import LayerGroup


def counted(scheduler):
    """(queries, their tokens, what they found) so far."""
    stats = scheduler.manager.stats()
    return stats.queries, stats.query_tokens, stats.hit_tokens


def test_O2_a_request_that_had_to_wait_is_one_query(make_scheduler, request_of, step):
    scheduler = make_scheduler(10, 4, {"first": (28, 5)})
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
    stats = scheduler.manager.stats()
    assert stats.hit_rate == stats.recent_hit_rate == stats.mean_idle_steps == stats.mean_lifetime_steps == 0


def test_saved_tokens_are_told_by_where_they_were(make_scheduler, request_of, run):
    scheduler = make_scheduler(6, 4, host_blocks=12, host_caching=True)
    a, b = list(range(8)), list(range(100, 123))
    for name, prompt in (("a", [*a, 1]), ("device", [*a, 2]), ("b", b), ("host", [*a, 3])):
        scheduler.add(request_of(name, prompt, max_tokens=1))
        run(scheduler)
    for name in ("leads", "shares"):
        scheduler.add(request_of(name, [*range(200, 208), 1], max_tokens=1))
    run(scheduler)
    stats = scheduler.manager.stats()
    assert (stats.device_hit_tokens, stats.host_hit_tokens, stats.pending_hit_tokens) == (8, 8, 8)
    assert stats.hit_tokens == 24


def test_the_recent_hit_rate_looks_back_on_a_thousand_lookups(make_manager, serve):
    manager, tokens = make_manager(4, 4), [1, 2, 3, 4, 5]
    for computes in (*[False] * 3, True, *[False] * 999):
        if computes:
            serve(manager, tokens)
        else:
            manager.free([manager.add(tokens)])
    stats = manager.stats()
    assert (stats.hit_rate, stats.recent_hit_rate) == ((999 * 4) / (1003 * 5), (999 * 4) / (1000 * 5))


@pytest.mark.parametrize("kinds", [["full"], ["full", "window"], ["window"]])
def test_evicted_blocks_tell_how_long_they_lived_and_lay_idle(make_manager, fill, kinds):
    groups, pages = [LayerGroup(kind, 8 * (kind == "window"), pages=2) for kind in kinds], 2 * len(kinds)
    manager = make_manager(2 * pages, 4, groups=groups)
    manager.next_batch()
    row = fill(manager, range(8))
    for _ in range(3):
        manager.next_batch()
    manager.free([row])
    for _ in range(5):
        manager.next_batch()
    manager.free([fill(manager, range(100, 108))])
    stats = manager.stats()
    # Begun in one step, which confirm ended, given back three later, evicted five after that.
    assert (stats.evicted_blocks, stats.mean_idle_steps, stats.mean_lifetime_steps) == (2 * pages, 5, 9)
