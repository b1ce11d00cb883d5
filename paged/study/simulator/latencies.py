"""When each request's tokens came out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.study.simulator.result import Percentiles

Seconds = NDArray[np.float64]


class Latencies:
    """Columns over a trace's requests, float64 [requests]: virtual seconds, NaN for what has not happened.

    arrival      when it came
    first, last  when its first and its latest token came out
    longest_gap  longest time between two of its tokens
    """

    def __init__(self, num_requests: int) -> None:
        self.arrival, self.first, self.last, self._end, self.longest_gap = np.full((5, num_requests), np.nan)
        # Gaps between tokens, an array a note, and how many tokens had each of a note's gaps.
        self._gaps: list[Seconds] = []
        self._gap_counts: list[int] = []
        # Of so many notes: replicas share latencies, and each is asked.
        self._itl = 0, Percentiles.of(np.empty(0))

    def arrived(self, request: int, now: float) -> None:
        """The request came."""
        self.arrival[request] = now

    def tokens(self, requests: NDArray[np.int64], now: float) -> None:
        """Each of these distinct requests has a new token."""
        gaps = now - self.last[requests]
        self.last[requests] = now
        is_first = np.isnan(gaps)
        if is_first.any():
            self.first[requests[is_first]] = now
            requests, gaps = requests[~is_first], gaps[~is_first]
        self._note(requests, gaps, gaps, 1)

    def steady_tokens(self, requests: NDArray[np.int64], times: Seconds) -> None:
        """Each of these distinct requests has a new token at each of these rising `times`, and had its last one before them all."""
        self.tokens(requests, float(times[0]))
        gaps = times[1:] - times[:-1]
        if len(gaps) and len(requests):
            self.last[requests] = times[-1]
            self._note(requests, gaps.max(), gaps, len(requests))

    def finished(self, requests: NDArray[np.int64], now: float) -> None:
        """These requests had their last token."""
        self._end[requests] = now

    def _note(self, requests: NDArray[np.int64], longest: Any, gaps: Seconds, count: int) -> None:
        """Gaps of these requests, each of which so many of them had, and the longest of each."""
        if len(gaps):
            self.longest_gap[requests] = np.fmax(self.longest_gap[requests], longest)
            self._gaps.append(gaps)
            self._gap_counts.append(count)

    @property
    def last_token_s(self) -> float:
        """When the latest token of all came out; 0 before the first."""
        return float(np.nanmax(self.last)) if np.isfinite(self.last).any() else 0.0

    @property
    def ttft(self) -> Seconds:
        """Time to first token by request, float64 [requests]."""
        return self.first - self.arrival

    @property
    def e2e(self) -> Seconds:
        """Arrival to last token by request, float64 [requests]; NaN for who has not finished."""
        return self._end - self.arrival

    @property
    def num_notes(self) -> int:
        """How many times gaps were noted so far."""
        return len(self._gaps)

    def gaps(self, first_note: int = 0) -> tuple[Seconds, NDArray[np.int64]]:
        """Gaps between tokens as they were noted, float64 [n], and how many tokens had each, int64 [n]; from that note on."""
        gaps = self._gaps[first_note:]
        if not gaps:
            return np.empty(0), np.empty(0, np.int64)
        counts = np.repeat(np.array(self._gap_counts[first_note:], np.int64), [len(part) for part in gaps])
        return np.concatenate(gaps), counts

    def percentiles(self) -> dict[str, Any]:
        """`Percentiles` of ttft_s, itl_s (all gaps), longest_gap_s and e2e_s, as results have them."""
        if self._itl[0] != self.num_notes:
            self._itl = self.num_notes, Percentiles.of(*self.gaps())
        return {
            "ttft_s": Percentiles.of(self.ttft),
            "itl_s": self._itl[1],
            "longest_gap_s": Percentiles.of(self.longest_gap),
            "e2e_s": Percentiles.of(self.e2e),
        }
