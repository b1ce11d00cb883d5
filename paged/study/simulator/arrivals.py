"""The clients and the model of a simulated service: when the trace's next request comes, and the tokens of its answer."""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

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


STOP = 2**31 - 1
"""The token that ends a request whose declared maximum is more than its output."""


class Answers:
    """Whole outputs as rows of one table, so that a step's tokens are one gather for any number of requests."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        # Row of the table by request; -1: none. Rows of ended requests are reused.
        self._place = np.full(len(trace), -1, np.int64)
        self._free: list[int] = []
        self._table = np.empty((0, 1), np.int32)

    def begin(self, requests: Iterable[int]) -> None:
        """Make the outputs of these requests, unless they exist."""
        for request in requests:
            if self._place[request] < 0:
                self._make(request)

    def tokens(self, requests: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the tokens of these requests, which were begun, at places counted from 0: int32 of the places' shape, [n] or [n, steps]."""
        rows = self._place[requests]
        return self._table[rows if places.ndim == 1 else rows[:, None], places]

    def forget(self, requests: list[int]) -> None:
        """Forget the outputs of requests that have ended."""
        for request in requests:
            row = int(self._place[request])
            if row >= 0:
                self._place[request] = -1
                self._free.append(row)

    def _make(self, request: int) -> None:
        trace = self._trace
        length = int(trace.output_tokens[request])
        written = np.minimum(trace.output(request), np.int32(STOP - 1))
        if trace.max_tokens[request] > length:
            written[-1] = STOP
        if not self._free:
            height = len(self._table)
            self._free = list(range(2 * height + 8))[height:]
            self._table = np.resize(self._table, (2 * height + 8, self._table.shape[1]))
        if length > self._table.shape[1]:
            wider = np.empty((len(self._table), 2 * length), np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        row = self._free.pop()
        self._table[row, :length] = written
        self._place[request] = row
