"""Which request of a trace comes next, and when: at the trace's own times, or when a client of a closed loop has nothing to wait for."""

from collections import deque

import numpy as np

from paged.study.traces import Trace


class Arrivals:
    """`num_added` requests have come so far, in the trace's order. Data-parallel ranks share one."""

    def __init__(self, trace: Trace, clients: int | None) -> None:
        self.num_added = 0
        self._clients = clients
        self._num_requests = len(trace)
        # Since when each client that has nothing to wait for has had nothing, in order.
        self._idle_since: deque[float] = deque([0.0] * (clients or 0))
        # As Python's own, one more than there are: in every step it is asked when the next one comes.
        self._times: list[float] = [*trace.arrival_s.tolist(), np.inf]

    @property
    def are_left(self) -> bool:
        """Whether a request is still to come."""
        return self.num_added < self._num_requests

    def next_s(self) -> float:
        """When the next request comes; never, while every client waits."""
        if self._clients is None:
            return self._times[self.num_added]
        return self._idle_since[0] if self._idle_since and self.are_left else np.inf

    def take(self) -> int:
        """The next request's number."""
        self.num_added += 1
        return self.num_added - 1

    def is_waited_for(self) -> None:
        """The client of the latest request waits for its answer; of one that was rejected it does not."""
        if self._clients is not None:
            self._idle_since.popleft()

    def answered(self, count: int, now_s: float) -> None:
        """So many requests have ended, whose clients have nothing to wait for any more."""
        if self._clients is not None:
            self._idle_since.extend([now_s] * count)
