"""Output lengths: guesses from the outputs that have ended."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

WINDOW = 1000


class OutputLengths:
    """The last WINDOW output lengths, and one at the cap for all that was never seen. Among the lengths above g, the
    share `quantile` lies within the guess for a sequence that has written g tokens."""

    def __init__(self, cap: int, assumed: int = 0) -> None:
        """`cap`: most tokens of an output. `assumed`: log-uniform guesses; each ended output replaces one."""
        self._num = self._sum = 0
        # An unknown length is 0, below any other.
        self._ring = [0] * WINDOW
        assumed = min(assumed, WINDOW)
        self._ring[:assumed] = [round(cap ** ((place + 0.5) / assumed)) for place in range(assumed)]
        # The cap, the ring's lengths and a 0, negated and so rising from the longest. An int64 array takes inserts.
        self._rising = array("q", sorted(-length for length in (cap, *self._ring, 0)))

    def note(self, length: int) -> None:
        rising, place = self._rising, self._num % WINDOW
        self._sum += length - (self._ring[place] if self._num >= WINDOW else 0)
        rising.pop(bisect_left(rising, -self._ring[place]))
        insort(rising, -length)
        self._ring[place] = length
        self._num += 1

    @property
    def num_noted(self) -> int:
        return self._num

    @property
    def mean(self) -> float | None:
        """Mean length of the ended ones, assumed ones excluded; None before the first has ended."""
        return self._sum / min(self._num, WINDOW) if self._num else None

    def mean_remaining(self, written: Counts, going: Counts) -> NDArray[np.float64]:
        """Return the mean of tokens to come after `written`, float64 [n], assumed lengths excluded; NaN if none is
        known. Sequences still `going`, int64 [k] tokens so far, count as longer: ended ones are the short part of what
        came (Kaplan and Meier, 1958). Beyond the longest that ended, outputs end at a constant rate."""
        ended = np.sort(np.array(self._ring[: min(self._num, WINDOW)], np.int64))
        if not len(ended):
            return np.full(len(written), np.nan)
        # One of the outputs that reached each length ended there.
        reached = np.arange(len(ended), 0, -1) + len(going) - np.sort(going).searchsorted(ended)
        lasting = np.concatenate([[1.0], np.multiply.accumulate(1.0 - 1.0 / reached)])
        tail = (ended.sum() + going.sum()) / len(ended) * lasting[-1]
        # Mean tokens after each length, of all outputs ever begun.
        widths = np.diff(ended, prepend=0) * lasting[:-1]
        after = np.concatenate([widths[::-1].cumsum()[::-1], [0.0]]) + tail
        place = ended.searchsorted(written, "right")
        come = after[np.minimum(place + 1, len(ended))]
        first = ended[np.minimum(place, len(ended) - 1)]
        come = np.where(place < len(ended), come + (first - written) * lasting[place], tail)
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = come / lasting[place]
        return means

    def remaining(self, written: Counts, quantile: float) -> Counts:
        """Return the tokens to come after `written`, int64 [n]; below 1 if only an immediate end is known."""
        unwritten = -written
        rising = np.frombuffer(self._rising, np.int64)
        # The first length that at most the share 1 - quantile of the lengths above `written` exceed.
        longer = rising.searchsorted(unwritten)
        unwritten -= rising[((1.0 - quantile) * longer).astype(np.int64)]
        return unwritten
