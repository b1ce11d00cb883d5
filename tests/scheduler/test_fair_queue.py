"""The queue in which tenants take turns, by itself: its books stay small, and it says what is wrong in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler, Status
from paged.scheduler.fair_queue import MOST_IDLE, FairQueue
from paged.scheduler.lengths import OutputLengths
from paged.scheduler.request import state_of


def state(number, tenant=None, prompt=4, outputs=4, **fields):
    request = Request(id=str(number), prompt=[1], max_tokens=outputs, tenant=tenant, **fields)
    order = (request.priority, 0.0, number)
    return state_of(request, np.ones(prompt, np.int32), b"", order, prompt + outputs)


def let_in(queue, request):
    queue.let_in(request)
    request.is_new = False


def ended(queue, request, num_output):
    request.num_output = num_output
    queue.ended(request)


@pytest.fixture
def queue():
    return FairQueue({"b": 2.0}, OutputLengths(1000))


def test_without_hint_or_outputs_so_far_a_request_is_expected_to_take_all_that_it_may(queue):
    request = state(0, outputs=100)
    queue.add(request)
    let_in(queue, request)
    assert request.charged == 104


def test_the_mean_of_what_ended_is_expected_and_a_hint_comes_first():
    lengths = OutputLengths(1000)
    for length in (10, 20):
        lengths.note(length)
    queue = FairQueue({}, lengths)
    requests = [state(0, outputs=100), state(1, outputs=5), state(2, outputs=100, expected_tokens=7)]
    requests.append(state(3, outputs=100, num_sequences=2))
    for request in requests:
        queue.add(request)
        let_in(queue, request)
    assert [request.charged for request in requests] == [19, 9, 11, 34]


def test_who_was_let_in_stands_in_that_order_from_then_on(queue):
    requests = [state(0, "a"), state(1, "a"), state(2, "b")]
    for request in requests:
        queue.add(request)
    for request in (requests[0], requests[2], requests[1]):
        let_in(queue, request)
    assert sorted(requests, key=lambda each: each.order) == [requests[0], requests[2], requests[1]]
    assert queue.num == 0


def test_a_tenant_of_which_nothing_is_alive_is_forgotten(queue):
    for number in range(3):
        request = state(number, f"tenant{number}")
        queue.add(request)
        let_in(queue, request)
        ended(queue, request, 4)
    assert (queue._tenants, dict(queue._idle)) == ({}, {})


def test_of_tenants_that_went_only_so_many_are_remembered_as_having_had_their_turn(queue):
    queue.add(state(-1, "stays"))
    for number in range(MOST_IDLE + 500):
        request = state(number, f"tenant{number}")
        queue.add(request)
        let_in(queue, request)
        ended(queue, request, 4)
    assert len(queue._idle) == MOST_IDLE and list(queue._tenants) == ["stays"]
    again = state(10_000, f"tenant{number}")
    queue.add(again)
    # It has had its turn, and "stays" has not.
    assert [each.id for each in queue] == ["-1", "10000"]


def test_a_refund_moves_a_tenant_forward(queue):
    first = state(0, "a", outputs=100)
    queue.add(first)
    let_in(queue, first)
    for number, tenant in ((1, "a"), (2, "c"), (3, "c")):
        queue.add(state(number, tenant))
    assert [each.id for each in queue] == ["2", "3", "1"]
    ended(queue, first, 1)
    assert [each.id for each in queue] == ["2", "1", "3"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "let in", "remove", "give up", "end"]), st.integers(0, 11)),
        max_size=60,
    )
)
def test_its_ways_to_ask_agree(calls):
    queue, waiting, inside = FairQueue({"b": 2.0}, OutputLengths(1000)), [], []
    for number, (call, pick) in enumerate(calls):
        if call == "add":
            waiting.append(state(number, (None, "a", "b")[pick % 3], prompt=1 + pick, priority=pick % 2))
            queue.add(waiting[-1])
        elif call in ("let in", "remove") and waiting:
            request = waiting.pop(pick % len(waiting))
            if call == "remove":
                queue.remove(request)
                if not request.is_new:
                    queue.ended(request)
            else:
                let_in(queue, request)
                request.status = Status.RUNNING
                inside.append(request)
        elif call == "give up" and inside:
            waiting.append(inside.pop(pick % len(inside)))
            waiting[-1].status = Status.WAITING
            queue.add(waiting[-1])
        elif call == "end" and inside:
            ended(queue, inside.pop(pick % len(inside)), pick)
        listed = list(queue)
        assert len(queue) == len(listed) == len(waiting) and {*listed} == {*waiting}
        assert not listed or queue.head() is listed[0]
        assert queue.behind(4) == listed[1:5]
        assert [each.order[0] for each in listed] == sorted(each.order[0] for each in waiting)
        assert queue.violations([*waiting, *inside], ()) == []


def test_what_is_wrong_in_its_books_is_told():
    scheduler = Scheduler(BlockManager(8, 4), policy="paged-fair")
    for number in range(3):
        scheduler.add(Request(id=str(number), prompt=[1], tenant="ab"[number % 2]))
    queue = scheduler._state.waiting
    assert scheduler.check() == []
    queue._entries.reverse()
    assert scheduler.check() == ["11: the waiting queue is out of order."]
    queue._entries.reverse()
    queue._tenants["a"].num_in += 1
    assert scheduler.check() == ["9: tenant 'a' has other requests than its books say."]
    queue._tenants["a"].num_in -= 1
    queue._tenants["b"].start = 9.0
    assert "11: tenant 'b' stands at (0, 0.0, 1), and belongs at (0, 9.0, 1)." in scheduler.check()
