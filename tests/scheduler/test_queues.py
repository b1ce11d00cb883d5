"""The queue of requests in their order, against a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from paged.scheduler.queues import OrderedQueue
from paged.scheduler.request import Request, RequestState, state_of


def waiting(priority: int, arrival: float, number: int) -> RequestState:
    request = Request(id=f"{priority}/{arrival}/{number}", prompt=[1])
    return state_of(request, np.array([1], np.int32), b"", (priority, arrival, number), 9)


def test_heads_that_left_are_let_go():
    queue = OrderedQueue()
    for number in range(100):
        queue.add(waiting(0, 0.0, number))
    for _ in range(99):
        queue.remove(queue.head())
    assert len(queue._states) <= 2


CALLS = st.sampled_from(["add", "add", "head", "any", "come back"])


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(CALLS, st.integers(0, 3), st.sampled_from([0.0, 1.0])), max_size=80))
def test_it_is_a_list_sorted_by_priority_arrival_and_number(calls):
    queue, expected, gone = OrderedQueue(), [], []
    for number, (call, value, arrival) in enumerate(calls):
        if call in ("add", "come back"):
            state = gone.pop() if call == "come back" and gone else waiting(value, arrival, number)
            expected = sorted([*expected, state], key=lambda each: each.order)
            assert queue.add(state) == (expected[-1] is state)
            assert queue.place_of(state) == expected.index(state)
        elif expected:
            gone.append(expected.pop(0 if call == "head" else value % len(expected)))
            queue.remove(gone[-1])
        assert [len(queue), *queue] == [len(expected), *expected]
        assert not expected or queue.head() is expected[0]
