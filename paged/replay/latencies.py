"""When each request's tokens came out.

Knows arrivals, first and last tokens and the gaps between. Does not know why a token was late.
"""

import numpy as np
from numpy.typing import NDArray

from paged.replay.result import Percentiles


class Latencies:
    """Columns over a trace's requests; times in virtual seconds, NaN for what has not happened."""

    def __init__(self, arrival_s: NDArray[np.float64]) -> None:
        self._arrival = arrival_s
        self._first = np.full(len(arrival_s), np.nan)
        self._last = np.full(len(arrival_s), np.nan)
        self._end = np.full(len(arrival_s), np.nan)
        self._longest_gap = np.full(len(arrival_s), np.nan)
        self._gaps: list[NDArray[np.float64]] = []

    def tokens(self, requests: NDArray[np.int64], now: float) -> None:
        """Each of these distinct requests has a new token."""
        is_first = np.isnan(self._first[requests])
        self._first[requests[is_first]] = now
        going_on = requests[~is_first]
        gaps = now - self._last[going_on]
        self._gaps.append(gaps)
        self._longest_gap[going_on] = np.fmax(self._longest_gap[going_on], gaps)
        self._last[requests] = now

    def finished(self, requests: NDArray[np.int64], now: float) -> None:
        """These requests had their last token."""
        self._end[requests] = now

    @property
    def last_token_s(self) -> float:
        """When the latest token of all came out; 0 before the first."""
        return float(np.nanmax(self._last)) if np.isfinite(self._last).any() else 0.0

    def ttft(self) -> Percentiles:
        return Percentiles.of(_known(self._first - self._arrival))

    def itl(self) -> Percentiles:
        return Percentiles.of(np.concatenate(self._gaps) if self._gaps else np.empty(0))

    def longest_gap(self) -> Percentiles:
        return Percentiles.of(_known(self._longest_gap))

    def e2e(self) -> Percentiles:
        return Percentiles.of(_known(self._end - self._arrival))


def _known(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return seconds[~np.isnan(seconds)]
