"""The next request of a trace and its time: the trace's own, or when a client of a closed loop is idle."""

from collections import deque

import numpy as np

from paged.study.traces import Trace


class Arrivals:
    """Hands out a trace's requests in order; `num_added` have come so far. Data-parallel ranks share one."""

    def __init__(self, trace: Trace, clients: int | None) -> None:
        self.num_added = 0
        self._clients = clients
        self._num_requests = len(trace)
        # Since when each idle client is idle, in order.
        self._idle_since: deque[float] = deque([0.0] * (clients or 0))
        # Python numbers, since every step reads one; the last means never.
        self._times: list[float] = [*trace.arrival_s.tolist(), np.inf]

    @property
    def are_left(self) -> bool:
        """Whether a request is still to come."""
        return self.num_added < self._num_requests

    def next_s(self) -> float:
        """Return when the next request comes; infinity while every client waits."""
        if self._clients is None:
            return self._times[self.num_added]
        return self._idle_since[0] if self._idle_since and self.are_left else np.inf

    def take(self) -> int:
        """Take the next request. Return its number."""
        self.num_added += 1
        return self.num_added - 1

    def is_waited_for(self) -> None:
        """Note that the client of the latest request waits for its answer, as it does unless that was rejected."""
        if self._clients is not None:
            self._idle_since.popleft()

    def answered(self, count: int, now_s: float) -> None:
        """Note that so many requests have ended, so that their clients are idle."""
        if self._clients is not None:
            self._idle_since.extend([now_s] * count)
