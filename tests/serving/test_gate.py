"""Who is let in when too many come, and whether who was told to come again is let in then."""

import asyncio
import heapq
import random

import pytest
from hypothesis import given, strategies as st

from paged.serving.bodies import CompletionRequest
from paged.serving.errors import ApiError
from paged.serving.front import INLINE_CHARS, Call, Front
from paged.serving.gate import MOST_ALIKE, Gate, fingerprint_of, later
from paged.serving.settings import Settings, Tenant

from .samples import READY  # noqa: TID252


def gate(max_waiting=4, num_inside=0, **more):
    """A gate that has let so many in."""
    made = Gate(Settings(max_waiting=max_waiting, **more))
    for number in range(num_inside):
        made.enter(None, b"%d" % number, 1, 10, 0.0, [])
    return made


def refused(gate, name, now, forecast=(), tenant=None, tokens=10):
    """In how many seconds it is told to come again; None: it was let in."""
    try:
        gate.enter(tenant, name.encode(), 1, tokens, now, list(forecast))
    except ApiError as error:
        return error.retry_after
    return None


@pytest.mark.parametrize(("tenant", "tenants"), [(None, ()), ("t", ()), ("t", (Tenant(name="t"),))])
def test_as_many_wait_as_may_and_one_more_is_told_when_the_next_place_is_free(tenant, tenants):
    door, forecast = gate(tenants=tenants), [3.0, 5.0, 6.0, 9.0]
    assert [refused(door, f"r{i}", 0.0, tenant=tenant) for i in range(4)] == [None] * 4
    assert [refused(door, name, 0.0, forecast, tenant) for name in ("late", "later")] == [3.0, 5.0]


@pytest.mark.parametrize("comes_early", [False, True])
def test_a_place_is_kept_for_who_was_told_to_come_though_he_came_too_early_and_not_given_to_a_newcomer(comes_early):
    door = gate(num_inside=4)
    refused(door, "told", 0.0, [5.0] * 4)
    if comes_early:
        assert refused(door, "told", 2.0, [3.0] * 4) == pytest.approx(3.0)
    door.leave(None, 1, 10)
    assert refused(door, "newcomer", 5.0, [1.0] * 4) is not None
    assert refused(door, "told", 5.0, [1.0] * 4) is None
    assert door.all.num == 4


def test_one_that_asks_again_and_again_is_kept_no_more_places_than_there_are_for_clients_that_are_alike():
    door = gate(num_inside=4)
    for moment in range(2 * MOST_ALIKE):
        with pytest.raises(ApiError, match=r"^4 requests wait; there is room in about [\d.]+ s\.$"):
            door.enter(None, b"same", 1, 10, moment / 1e6, [1e4] * 4)
    assert door.all.num_kept == 1 + MOST_ALIKE
    # Another one has his place all the same.
    assert refused(door, "other", 1.0, [1e4] * 4) is not None
    assert door.all.num_kept == 2 + MOST_ALIKE


def test_who_does_not_come_loses_his_place():
    door = gate(num_inside=4)
    refused(door, "told", 0.0, [2.0] * 4)
    door.leave(None, 1, 10)
    assert refused(door, "newcomer", 11.0, [20.0] * 4) is not None
    # Two places were kept from then on, of which the first has lapsed, and one that is let in does not need his any more.
    door.leave(None, 1, 10)
    assert refused(door, "another", 12.1) is None


def test_half_of_the_places_are_never_kept_so_that_the_engine_has_work_though_nobody_comes_again():
    door = gate(8, num_inside=8)
    for i in range(50):
        refused(door, f"told{i}", 0.0, [1.0] * 8)
    for _ in range(8):
        door.leave(None, 1, 10)
    assert [refused(door, f"new{i}", 0.5) is None for i in range(5)] == [True] * 4 + [False]


def test_tenants_and_tokens_have_limits_of_their_own_but_one_that_is_alone_always_may_wait():
    door = gate(10, tenants=(Tenant(name="small", max_waiting=1), Tenant(name="big")))
    asked = (("a", "small"), ("b", "small"), ("b", "big"))
    assert [refused(door, name, 0.0, tenant=tenant) is None for name, tenant in asked] == [True, False, True]
    door = gate(10, max_waiting_tokens=100)
    assert refused(door, "a", 0.0, tokens=500) is None
    assert refused(door, "b", 0.0, tokens=1) is not None
    door.leave(None, 1, 500)
    assert refused(door, "c", 100.0, tokens=99) is None


def test_nobody_is_let_in_who_would_wait_for_longer_than_may_be_waited():
    door = gate(100, max_queue_s=4.0)
    forecast = [1.0 * place for place in range(50)]
    assert [refused(door, f"r{i}", 0.0, forecast) for i in range(5)] == [None] * 5
    # It would begin in 5 s; in 2 s those who wait are so few that it begins within 3 s of then.
    assert (refused(door, "late", 0.0, forecast), refused(door, "later", 0.0, forecast)) == (2.0, 3.0)
    # Before the first step has ended there is no forecast.
    assert refused(gate(100, num_inside=4, max_queue_s=0.5), "first", 0.0) is None


def test_what_is_asked_and_by_whom_is_the_fingerprint():
    asks = [("k", b"a"), ("k", b"b"), ("l", b"a"), ("", b"a")]
    assert len({fingerprint_of(*each) for each in asks * 2}) == 4


calls = st.tuples(
    st.sampled_from(["enter", "leave", "wait"]), st.integers(0, 5), st.sampled_from([None, "a", "b"]), st.floats(0, 30)
)


@given(st.integers(1, 6), st.lists(calls, max_size=60))
def test_counts_are_those_of_who_was_let_in_and_no_more_wait_than_may(most, calls):
    door = Gate(Settings(max_waiting=most, tenants=(Tenant(name="a", max_waiting=2),)))
    inside, now = [], 0.0
    for what, who, tenant, seconds in calls:
        if what == "wait":
            now += seconds
        elif what == "leave" and inside:
            door.leave(inside.pop(who % len(inside)), 1, 10)
        elif what == "enter" and refused(door, f"{who}", now, [1.0, 2.0], tenant) is None:
            inside.append(tenant)
        assert door.all.num == len(inside) <= most + max(1, most // 4)
        assert door.all.tokens == 10 * len(inside)
        assert inside.count("a") <= 3
        assert door.all.num_kept >= 0
    while inside:
        door.leave(inside.pop(), 1, 10)
    assert door.all.num == door.all.tokens == 0


def test_a_forecast_that_has_grown_old_is_that_of_those_who_wait_still():
    forecast = [0.1 * place for place in range(1, 9)]
    # Requests began as was foreseen: who comes now waits for as long as who came then.
    assert later(forecast, 0, 0.0) == pytest.approx(forecast)
    assert later(forecast, 3, 0.3) == pytest.approx(forecast)
    assert later(forecast, 20, 2.0) == pytest.approx(forecast)
    # Half as many did: it goes on half a second late, and nobody's time has passed.
    assert later(forecast, 2, 0.4)[:3] == pytest.approx([0.0, 0.0, 0.1])
    assert later([], 3, 1.0) == []


def replayed(load, error, seed, num=3000, max_waiting=16, is_same=False):
    """Of clients that wait as told and come again, the share that is let in then. One request is served at a time, for a second in the mean;
    what is forecast is the mean, off by a factor of up to 1 ± `error`. `is_same`: all ask the same, without a key, from one address."""
    random_ = random.Random(seed)
    door = gate(max_waiting)
    events, now = [], 0.0
    for i in range(num):
        now += random_.expovariate(load)
        heapq.heappush(events, (now, i, "comes"))
    waiting, free_at, again = 0, 0.0, {}
    while events:
        now, who, what = heapq.heappop(events)
        if what == "free":
            free_at = now
        else:
            off = random_.uniform(1 - error, 1 + error)
            forecast = [max(0.0, free_at - now) + off * place for place in range(waiting + 256)]
            wait = refused(door, "same" if is_same else f"client{who}", now, forecast)
            if what == "comes again":
                again[who] = wait is None
            if wait is None:
                waiting += 1
            elif what == "comes":
                heapq.heappush(events, (now + wait, who, "comes again"))
        if waiting and free_at <= now:
            waiting -= 1
            door.leave(None, 1, 10)
            free_at = now + random_.expovariate(1.0)
            heapq.heappush(events, (free_at, -1, "free"))
    assert len(again) > num / 10
    return sum(again.values()) / len(again)


@pytest.mark.parametrize("load", [1.4, 3.0])
@pytest.mark.parametrize(
    ("error", "more"),
    [(0.0, {}), (0.3, {}), (0.3, {"num": 800, "is_same": True})],
    ids=["exact", "off", "all the same"],
)
def test_nine_of_ten_who_wait_as_told_are_let_in_when_they_come_again(load, error, more):
    assert replayed(load, error, seed=1, **more) >= 0.9


def test_a_call_whose_engine_dies_while_its_prompt_is_read_holds_no_place():
    async def call():
        front = Front(Settings(log="off"))
        front.engine.state, front.engine.ready = "ready", READY
        body = CompletionRequest(prompt=[1])
        called = asyncio.create_task(front.completion(body, Call("a", "b", "", 0.0, "", None, b" " * INLINE_CHARS * 2)))
        await asyncio.sleep(0)
        front.engine.state = "restarting"
        with pytest.raises(ApiError, match=r"^the engine is restarting\.$"):
            await called
        await front.close()
        return front.num_open, front.gate.all.num

    assert asyncio.run(call()) == (0, 0)
