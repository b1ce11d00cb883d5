"""The queue of requests in their order, against a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from paged.scheduler.queues import OrderedQueue
from paged.scheduler.request import Request, RequestState, state_of


def waiting(priority: int, arrival: float, number: int) -> RequestState:
    request = Request(id=f"{priority}/{arrival}/{number}", prompt=[1])
    return state_of(request, np.array([1], np.int32), b"", (priority, arrival, number), 9)


def orders(queue: OrderedQueue) -> list[tuple[int, float, int]]:
    return [state.order for state in queue]


def test_priority_comes_before_arrival_and_arrival_before_number():
    queue = OrderedQueue()
    for order in ((1, 0.0, 0), (0, 2.0, 1), (0, 1.0, 3), (0, 1.0, 2)):
        queue.add(waiting(*order))
    assert orders(queue) == [(0, 1.0, 2), (0, 1.0, 3), (0, 2.0, 1), (1, 0.0, 0)]


def test_adding_tells_whether_the_place_is_the_last():
    queue = OrderedQueue()
    assert [queue.add(waiting(0, arrival, 0)) for arrival in (2.0, 3.0, 1.0)] == [True, True, False]


def test_who_comes_back_stands_where_it_stood():
    queue = OrderedQueue()
    states = [waiting(0, 0.0, number) for number in range(3)]
    for state in states:
        queue.add(state)
    queue.remove(states[0])
    queue.add(states[0])
    assert queue.head() is states[0]


def test_heads_that_left_are_let_go():
    queue = OrderedQueue()
    for number in range(100):
        queue.add(waiting(0, 0.0, number))
    for _ in range(99):
        queue.remove(queue.head())
    assert len(queue._states) <= 2


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "head", "any"]), st.integers(0, 3)), max_size=80))
def test_it_is_a_sorted_list(calls):
    queue, expected = OrderedQueue(), []
    for number, (call, value) in enumerate(calls):
        if call == "add":
            state = waiting(value, 0.0, number)
            expected = sorted([*expected, state], key=lambda each: each.order)
            assert queue.add(state) == (expected[-1] is state)
            assert queue.place_of(state) == expected.index(state)
        elif expected:
            state = expected.pop(0 if call == "head" else value % len(expected))
            queue.remove(state)
        assert [len(queue), *queue] == [len(expected), *expected]
        assert not expected or queue.head() is expected[0]
