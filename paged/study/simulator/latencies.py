"""The times of each request's tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.simulator.result import Percentiles

Seconds = NDArray[np.float64]


class Latencies:
    """Columns over a trace's requests, float64 [requests]: seconds, NaN for what has not happened.

    arrival      of the request
    first, last  of its first and its latest token
    longest_gap  longest time between two of its tokens
    """

    def __init__(self, num_requests: int) -> None:
        self.arrival, self.first, self.last, self._end, self.longest_gap = np.full((5, num_requests), np.nan)
        # Gaps between tokens, an array for each note, and how many tokens had each of a note's gaps.
        self._gaps: list[Seconds] = []
        self._gap_counts: list[int] = []
        # Percentiles of the gaps, and the number of notes that they are of: replicas share latencies, and each reads them.
        self._itl = 0, Percentiles.of(np.empty(0))

    def arrived(self, request: int, now: float) -> None:
        """Note that the request came."""
        self.arrival[request] = now

    def tokens(self, requests: NDArray[np.int64], now: float) -> None:
        """Note a new token of each of these distinct requests."""
        gaps = now - self.last[requests]
        self.last[requests] = now
        is_first = np.isnan(gaps)
        if is_first.any():
            self.first[requests[is_first]] = now
            requests, gaps = requests[~is_first], gaps[~is_first]
        self._note(requests, gaps, gaps, 1)

    def steady_tokens(self, requests: NDArray[np.int64], times: Seconds) -> None:
        """Note a new token of each of these distinct requests at each of these rising `times`, all after their last ones."""
        self.tokens(requests, float(times[0]))
        gaps = times[1:] - times[:-1]
        if len(gaps) and len(requests):
            self.last[requests] = times[-1]
            self._note(requests, gaps.max(), gaps, len(requests))

    def finished(self, requests: NDArray[np.int64], now: float) -> None:
        """Note that these requests had their last token."""
        self._end[requests] = now

    def _note(self, requests: NDArray[np.int64], longest: Any, gaps: Seconds, count: int) -> None:
        """Note gaps that `count` of these requests had each, and the longest gap of each request."""
        if len(gaps):
            self.longest_gap[requests] = np.fmax(self.longest_gap[requests], longest)
            self._gaps.append(gaps)
            self._gap_counts.append(count)

    @property
    def last_token_s(self) -> float:
        """The time of the latest token of all requests; 0 before the first."""
        return float(np.nanmax(self.last)) if np.isfinite(self.last).any() else 0.0

    @property
    def ttft(self) -> Seconds:
        """Time to first token by request, float64 [requests]."""
        return self.first - self.arrival

    @property
    def e2e(self) -> Seconds:
        """Arrival to last token by request, float64 [requests]; NaN for unfinished requests."""
        return self._end - self.arrival

    @property
    def num_notes(self) -> int:
        """The number of notes of gaps so far."""
        return len(self._gaps)

    def gaps(self, first_note: int = 0) -> tuple[Seconds, NDArray[np.int64]]:
        """Return the noted gaps from that note on, float64 [n], and how many tokens had each, int64 [n]."""
        gaps = self._gaps[first_note:]
        if not gaps:
            return np.empty(0), np.empty(0, np.int64)
        counts = np.repeat(np.array(self._gap_counts[first_note:], np.int64), [len(part) for part in gaps])
        return np.concatenate(gaps), counts

    def percentiles(self) -> dict[str, Any]:
        """Return `Percentiles` of ttft_s, itl_s (all gaps), longest_gap_s and e2e_s by these names."""
        if self._itl[0] != self.num_notes:
            self._itl = self.num_notes, Percentiles.of(*self.gaps())
        return {
            "ttft_s": Percentiles.of(self.ttft),
            "itl_s": self._itl[1],
            "longest_gap_s": Percentiles.of(self.longest_gap),
            "e2e_s": Percentiles.of(self.e2e),
        }
