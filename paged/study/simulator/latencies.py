"""When each request's tokens came out."""

import numpy as np
from numpy.typing import NDArray

from paged.study.simulator.result import Percentiles


class Latencies:
    """Columns over a trace's requests; times in virtual seconds, NaN for what has not happened."""

    def __init__(self, num_requests: int) -> None:
        self._arrival = np.full(num_requests, np.nan)
        self._first = np.full(num_requests, np.nan)
        self._last = np.full(num_requests, np.nan)
        self._end = np.full(num_requests, np.nan)
        self._longest_gap = np.full(num_requests, np.nan)
        # Gaps between tokens, an array a note, and how many tokens had each of a note's gaps.
        self._gaps: list[NDArray[np.float64]] = []
        self._gap_counts: list[int] = []
        # Of so many notes: replicas share latencies, and each is asked.
        self._itl = 0, Percentiles.of(np.empty(0))

    def arrived(self, request: int, now: float) -> None:
        """The request came."""
        self._arrival[request] = now

    def tokens(self, requests: NDArray[np.int64], now: float) -> None:
        """Each of these distinct requests has a new token."""
        gaps = now - self._last[requests]
        self._last[requests] = now
        is_first = np.isnan(gaps)
        if is_first.any():
            self._first[requests[is_first]] = now
            requests, gaps = requests[~is_first], gaps[~is_first]
        self._widen(requests, gaps)
        self._note(gaps, 1)

    def steady_tokens(self, requests: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        """Each of these distinct requests has a new token at each of these rising `times`, and had its last one before them all."""
        self.tokens(requests, float(times[0]))
        gaps = times[1:] - times[:-1]
        if len(gaps) and len(requests):
            self._last[requests] = times[-1]
            self._widen(requests, gaps.max())
            self._note(gaps, len(requests))

    def finished(self, requests: NDArray[np.int64], now: float) -> None:
        """These requests had their last token."""
        self._end[requests] = now

    def _widen(self, requests: NDArray[np.int64], gaps: NDArray[np.float64] | np.float64) -> None:
        self._longest_gap[requests] = np.fmax(self._longest_gap[requests], gaps)

    def _note(self, gaps: NDArray[np.float64], count: int) -> None:
        if len(gaps):
            self._gaps.append(gaps)
            self._gap_counts.append(count)

    @property
    def last_token_s(self) -> float:
        """When the latest token of all came out; 0 before the first."""
        return float(np.nanmax(self._last)) if np.isfinite(self._last).any() else 0.0

    def arrived_of_each(self) -> NDArray[np.float64]:
        """When each request came, float64 [requests]; NaN where it has not."""
        return self._arrival

    def first_of_each(self) -> NDArray[np.float64]:
        """When each request's first token came out, float64 [requests]; NaN where there was none."""
        return self._first

    def last_of_each(self) -> NDArray[np.float64]:
        """When each request's latest token came out, float64 [requests]; NaN where there was none."""
        return self._last

    def ttft_of_each(self) -> NDArray[np.float64]:
        """Time to first token by request, float64 [requests]; NaN where there was none."""
        return self._first - self._arrival

    def longest_gap_of_each(self) -> NDArray[np.float64]:
        """Longest time between two tokens by request, float64 [requests]; NaN below two tokens."""
        return self._longest_gap

    def e2e_of_each(self) -> NDArray[np.float64]:
        """Arrival to last token by request, float64 [requests]; NaN for who has not finished."""
        return self._end - self._arrival

    @property
    def num_notes(self) -> int:
        """How many times gaps were noted so far."""
        return len(self._gaps)

    def gaps(self, first_note: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Gaps between tokens as they were noted, float64 [n], and how many tokens had each, int64 [n]; from that note on."""
        gaps = self._gaps[first_note:]
        if not gaps:
            return np.empty(0), np.empty(0, np.int64)
        counts = np.repeat(np.array(self._gap_counts[first_note:], np.int64), [len(part) for part in gaps])
        return np.concatenate(gaps), counts

    def ttft(self) -> Percentiles:
        return Percentiles.of(_known(self.ttft_of_each()))

    def itl(self) -> Percentiles:
        if self._itl[0] != self.num_notes:
            self._itl = self.num_notes, Percentiles.of(*self.gaps())
        return self._itl[1]

    def longest_gap(self) -> Percentiles:
        return Percentiles.of(_known(self._longest_gap))

    def e2e(self) -> Percentiles:
        return Percentiles.of(_known(self.e2e_of_each()))


def _known(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return seconds[~np.isnan(seconds)]
