"""Queues by themselves, most of all the one in which tenants take turns: its books stay small, and it says what is wrong in them."""

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler
from paged.scheduler.fair_queue import MOST_IDLE, FairQueue
from paged.scheduler.foresight import OutputLengths
from paged.scheduler.queues import Queue
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


def test_heads_that_left_the_ordinary_queue_are_let_go():
    queue = Queue()
    for number in range(100):
        queue.add(state(number))
    for _ in range(99):
        queue.remove(queue.head())
    assert len(queue._states) <= 2


@pytest.fixture
def queue():
    return FairQueue({"b": 2.0}, OutputLengths(1000))


@pytest.mark.parametrize(
    ("ended_lengths", "fields", "charged"),
    [
        ((), {"outputs": 100}, 104),
        ((10, 20), {"outputs": 100}, 19),
        ((10, 20), {"outputs": 5}, 9),
        ((10, 20), {"outputs": 100, "expected_tokens": 7}, 11),
        ((10, 20), {"outputs": 100, "num_sequences": 2}, 34),
    ],
)
def test_a_hint_then_the_mean_of_what_ended_then_all_that_it_may_take_is_expected(ended_lengths, fields, charged):
    lengths = OutputLengths(1000)
    for length in ended_lengths:
        lengths.note(length)
    queue, request = FairQueue({}, lengths), state(0, **fields)
    queue.add(request)
    let_in(queue, request)
    assert request.charged == charged


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


def test_a_tenant_that_got_no_more_than_others_is_not_remembered(queue):
    queue.add(state(0, "stays"))
    found = state(1, "found all of it")
    queue.add(found)
    let_in(queue, found)
    found.hit_tokens = found.prompt_len
    ended(queue, found, 0)
    assert not queue._idle


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
    assert scheduler.check() == ["9: tenants have other requests than their books say."]
    queue._tenants["a"].num_in -= 1
    queue._tenants["b"].start = 9.0
    assert "11: tenant 'b' stands at (0, 0.0, 1), and belongs at (0, 9.0, 1)." in scheduler.check()
