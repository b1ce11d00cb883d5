"""The time that callers tell: a finite number that never goes back, whatever is kept until a time."""

import math

import pytest

from paged import Request, Retention

A = list(range(8))


def kept(**how):
    return Request(id="a", prompt=[*A, 1], max_tokens=1, retention=Retention(priority=2, **how))


def hit(scheduler):
    return scheduler.manager.lookup([*A, 999]).num_tokens


def push_out(scheduler, now):
    """Run requests whose content fills the pool of six blocks twice."""
    for number in range(4):
        scheduler.add(Request(id=f"r{number}", prompt=[1000 * number + i + 100 for i in range(13)], max_tokens=1))
        scheduler.update(scheduler.schedule(now=now), [7], now=now)


@pytest.mark.parametrize(
    ("told", "lasts"),
    [
        # now is left out in update, lags behind, or is so large that a little more is the same number.
        ((100.0, 0.0), 5.0),
        ((100.0, 93.0), 5.0),
        ((1.7e9, 1.7e9), 1e-9),
        ((100.0, 100.0), math.inf),
        ((1e308, 1e308), 1e308),
    ],
)
def test_a_request_ends_whenever_its_retention_ends(make_scheduler, told, lasts):
    scheduler = make_scheduler(6, 4)
    first, second = told
    scheduler.add(Request(id="before", prompt=[50, 51, 52, 53, 54], max_tokens=1, retention=Retention()))
    scheduler.update(scheduler.schedule(now=first), [7], now=first)
    scheduler.add(kept(lasts=lasts))
    (output,) = scheduler.update(scheduler.schedule(now=first), [7], now=second)
    assert output.finish_reason == "length"
    assert not scheduler.has_unfinished
    assert (scheduler.manager.device.num_used, scheduler.check()) == (0, [])


def test_a_retention_counts_from_the_latest_time_that_was_told(make_scheduler):
    scheduler = make_scheduler(6, 4)
    scheduler.add(kept(lasts=10.0))
    scheduler.update(scheduler.schedule(now=100.0), [7], now=3.0)
    push_out(scheduler, now=109.0)
    assert hit(scheduler) == 8
    push_out(scheduler, now=110.0)
    assert hit(scheduler) == 0


def test_integers_are_times_that_differ_where_floats_would_not(make_scheduler, request_of):
    scheduler = make_scheduler(4, 4, max_sequences=1)
    scheduler.add(request_of("later", 4), now=2**60 + 1)
    scheduler.add(request_of("sooner", 4), now=2**60)
    assert scheduler.waiting_ids() == ["sooner", "later"]


@pytest.mark.parametrize("way", ["schedule", "update", "update of an empty batch"])
def test_every_call_that_takes_a_time_tells_it(make_scheduler, way):
    scheduler = make_scheduler(10, 4)
    scheduler.add(Request(id="running", prompt=[90, 91], max_tokens=100))
    scheduler.update(scheduler.schedule(now=0.1), [7], now=0.1)
    if way == "schedule":
        scheduler.cancel(scheduler.schedule(now=50.0))
    if way == "update":
        scheduler.update(scheduler.schedule(now=0.1), [7], now=50.0)
    scheduler.abort("running")
    if way == "update of an empty batch":
        scheduler.update(scheduler.schedule(now=0.1), [], now=50.0)
    # Half a second from 50.0 on.
    scheduler.add(kept(lasts=0.5))
    scheduler.update(scheduler.schedule(now=1.0), [7], now=1.0)
    push_out(scheduler, now=50.4)
    assert hit(scheduler) == 8
