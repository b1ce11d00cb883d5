"""The time that callers tell: a finite number that never goes back, whatever is kept until a time."""

import math

import numpy as np
import pytest

from paged import Request, Retention
from paged.errors import InvalidRequest
from paged.testing.snapshots import snapshot

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


def test_a_retention_that_ended_before_the_managers_time_keeps_nothing_and_breaks_nothing(make_scheduler):
    scheduler = make_scheduler(6, 4)
    for name in ("before", "a"):
        scheduler.add(Request(id=name, prompt=[*A, 1], max_tokens=1, retention=Retention(lasts=5.0)))
        scheduler.update(scheduler.schedule(now=1.0), [7], now=1.0)
        scheduler.manager.expire(50.0)
    assert not scheduler.has_unfinished
    push_out(scheduler, now=1.0)
    assert hit(scheduler) == 0


NO_TIMES = [math.nan, math.inf, -math.inf, None, "x", True, 10**400, [1.0], 1j]


@pytest.mark.parametrize("now", NO_TIMES)
def test_what_is_no_time_is_refused_at_every_door(make_scheduler, request_of, now):
    scheduler = make_scheduler(8, 4, {"a": 4})
    sentence = "now has to be a finite number of seconds"
    with pytest.raises(InvalidRequest, match=sentence):
        scheduler.add(request_of("b", 4), now=now)
    with pytest.raises(InvalidRequest, match=sentence):
        scheduler.schedule(now=now)
    batch = scheduler.schedule()
    before = snapshot(scheduler.manager), scheduler.counts()
    with pytest.raises(InvalidRequest, match=sentence):
        scheduler.update(batch, [7], now=now)
    assert (snapshot(scheduler.manager), scheduler.counts()) == before
    scheduler.update(batch, [7])


@pytest.mark.parametrize("now", [3, 3.5, np.float32(3), np.float64(3), np.int8(3), -2.0])
def test_any_finite_number_is_a_time(make_scheduler, request_of, now):
    scheduler = make_scheduler(8, 4)
    scheduler.add(request_of("a", 4), now=now)
    scheduler.update(scheduler.schedule(now=now), [7], now=now)
    assert scheduler.status("a") == "running"


def test_integers_are_times_that_differ_where_floats_would_not(make_scheduler, request_of):
    scheduler = make_scheduler(4, 4, max_sequences=1)
    scheduler.add(request_of("later", 4), now=2**60 + 1)
    scheduler.add(request_of("sooner", 4), now=2**60)
    assert scheduler.waiting_ids() == ["sooner", "later"]


def keep(scheduler, now):
    """Run a request whose content is kept for half a second."""
    scheduler.add(kept(lasts=0.5))
    scheduler.update(scheduler.schedule(now=now), [7], now=now)


@pytest.fixture
def running(make_scheduler):
    """A scheduler at 0.1 s with one request that decodes."""
    scheduler = make_scheduler(10, 4)
    scheduler.add(Request(id="running", prompt=[90, 91], max_tokens=100))
    scheduler.update(scheduler.schedule(now=0.1), [7], now=0.1)
    return scheduler


def test_a_time_that_is_left_out_is_no_later_one(running):
    scheduler = running
    scheduler.update(scheduler.schedule(), [7])
    scheduler.abort("running")
    keep(scheduler, now=0.1)
    push_out(scheduler, now=0.7)
    assert hit(scheduler) == 0


@pytest.mark.parametrize("way", ["schedule", "update", "update of an empty batch"])
def test_every_call_that_takes_a_time_tells_it(running, way):
    scheduler = running
    if way == "schedule":
        scheduler.cancel(scheduler.schedule(now=50.0))
    if way == "update":
        scheduler.update(scheduler.schedule(now=0.1), [7], now=50.0)
    scheduler.abort("running")
    if way == "update of an empty batch":
        batch = scheduler.schedule(now=0.1)
        assert batch.is_empty
        scheduler.update(batch, [], now=50.0)
    keep(scheduler, now=1.0)
    push_out(scheduler, now=50.4)
    assert hit(scheduler) == 8
