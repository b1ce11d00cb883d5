"""The queue of requests lets go of what has left it."""

import numpy as np

from paged.scheduler.queues import OrderedQueue
from paged.scheduler.request import Request, state_of


def test_heads_that_left_are_let_go():
    queue = OrderedQueue()
    for number in range(100):
        request = Request(id=str(number), prompt=[1])
        queue.add(state_of(request, np.array([1], np.int32), b"", (0, 0.0, number), 9))
    for _ in range(99):
        queue.remove(queue.head())
    assert len(queue._states) <= 2
