"""Content that is to stay: kept longer than other content, until a time; and rows that keep out of the cache."""

import pytest

from paged import Request, Retention
from paged.errors import InvalidConfig, UnknownContent

A, B, C = ([start + i for i in range(8)] for start in (0, 100, 200))


@pytest.fixture
def run():
    """Run one request to its end; what it took."""

    def run(scheduler, request):
        scheduler.add(request)
        while scheduler.has_unfinished:
            batch = scheduler.schedule(now=1.0)
            for output in scheduler.update(batch, [7] * int(batch.samples.sum()), now=1.0):
                usage = output.usage
        return usage

    return run


def hit(manager, tokens):
    return manager.lookup([*tokens, 999]).num_tokens


@pytest.mark.parametrize("tokens", [B, A[:3], [*B[:4], *A]])
def test_a_retention_of_unknown_content_is_refused_and_changes_nothing(make_manager, serve, tokens, unchanged):
    manager = make_manager(4, 4)
    serve(manager, A)
    with unchanged(manager):
        with pytest.raises(UnknownContent, match=f"no full block of these {len(tokens)} tokens"):
            manager.retain(tokens, priority=2)
        with pytest.raises(UnknownContent):
            manager.retain(A, namespace="another tenant")


def test_content_of_a_higher_priority_goes_after_all_of_a_lower_one(make_manager, serve):
    manager = make_manager(6, 4)
    for tokens in (A, B, C):
        serve(manager, tokens)
    assert manager.retain(A, priority=2) == 8
    manager.retain(B, priority=1)
    for number, gone in enumerate((C, B, A)):
        assert hit(manager, gone) == 8
        serve(manager, [500 + 8 * number + i for i in range(8)])
        manager.retain([500 + 8 * number + i for i in range(8)], priority=3)
        assert hit(manager, gone) == 0


def test_a_retention_ends_at_its_time_and_not_before(make_manager, serve):
    manager = make_manager(4, 4)
    serve(manager, A)
    manager.retain(A, priority=1, until=10)
    serve(manager, B)
    manager.expire(9.5)
    serve(manager, C)
    assert (hit(manager, A), hit(manager, B)) == (8, 0)
    manager.expire(10)
    serve(manager, B)
    # From its end on it counts as used at that moment, which is later than C.
    assert (hit(manager, A), hit(manager, C)) == (8, 0)
    serve(manager, C)
    assert hit(manager, A) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"priority": 0}, "priority has to be from 1 to 3; got 0"),
        ({"priority": 4}, "from 1 to 3; got 4"),
        ({"priority": True}, "got True"),
        ({"until": float("nan")}, "until has to be a logical time"),
        ({"until": 3}, "after 7"),
    ],
)
def test_wrong_wishes_are_refused(make_manager, serve, options, sentence):
    manager = make_manager(4, 4)
    serve(manager, A)
    manager.retain(A, until=20)
    manager.expire(7)
    with pytest.raises(InvalidConfig, match=sentence):
        manager.retain(A, **options)


def test_a_request_says_how_its_content_is_kept(make_scheduler, run):
    scheduler = make_scheduler(6, 4)
    kept = Retention(priority=2, lasts=100.0)
    run(scheduler, Request(id="kept", prompt=[*A, 1], max_tokens=1, retention=kept))
    for number in range(4):
        run(scheduler, Request(id=f"other {number}", prompt=[1000 * number + i for i in range(13)], max_tokens=1))
    assert hit(scheduler.manager, A) == 8
    batch = scheduler.schedule(now=1000.0)
    scheduler.update(batch, [])
    for number in range(4):
        run(scheduler, Request(id=f"more {number}", prompt=[9000 * number + i for i in range(13)], max_tokens=1))
    assert hit(scheduler.manager, A) == 0


def test_requests_that_keep_to_themselves(make_scheduler, run):
    scheduler = make_scheduler(8, 4)
    run(scheduler, Request(id="a", prompt=[*A, 1], max_tokens=1))
    silent = run(scheduler, Request(id="b", prompt=[*A, 1], max_tokens=1, reads_cache=False))
    assert silent.hit_tokens == 0
    run(scheduler, Request(id="c", prompt=[*B, 1], max_tokens=1, writes_cache=False))
    assert run(scheduler, Request(id="d", prompt=[*B, 1], max_tokens=1)).hit_tokens == 0
    assert run(scheduler, Request(id="e", prompt=[*A, 1], max_tokens=1)).hit_tokens == 8


def test_a_parent_that_was_retained_alone_is_still_evicted_after_a_child_that_is_retained_later(make_manager, compute):
    manager = make_manager(3, 4)
    row = manager.add([1, 2, 3, 4, 5, 6, 7, 8])
    compute(manager, row)
    manager.retain([1, 2, 3, 4], priority=2)
    manager.free([row])
    manager.retain([1, 2, 3, 4, 5, 6, 7, 8], priority=2)
    other = manager.add([9] * 8)
    compute(manager, other)
    assert manager.check() == []
    found = manager.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.rows.num_computed[found] == 4
