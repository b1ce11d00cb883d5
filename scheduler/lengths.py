"""How long outputs become: a guess from the lengths of those that have ended."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

WINDOW = 1000


class OutputLengths:
    """The last WINDOW output lengths, and one at the cap.

    Of those that were longer than g tokens when a sequence has written g, the share `quantile` ended within the answer. The one at the
    cap stands for all that was never seen.
    """

    def __init__(self, cap: int, assumed: int = 0) -> None:
        """`cap`: tokens that an output has at most. `assumed`: lengths with which it begins, evenly spread over the logarithms of all; each
        output that ends takes the place of one."""
        # How many were noted, and the sum of those of them that are in the ring.
        self._num = self._sum = 0
        # A length that is not known yet is 0, so that no sequence is shorter.
        self._ring = [0] * WINDOW
        assumed = min(assumed, WINDOW)
        self._ring[:assumed] = [round(cap ** ((place + 0.5) / assumed)) for place in range(assumed)]
        # The cap, the ring's lengths and a 0, the longest first; negative, so that they rise. int64, and lets one be put in its place.
        self._rising = array("q", sorted(-length for length in (cap, *self._ring, 0)))

    def note(self, length: int) -> None:
        """A sequence has ended after so many output tokens."""
        rising, place = self._rising, self._num % WINDOW
        self._sum += length - (self._ring[place] if self._num >= WINDOW else 0)
        rising.pop(bisect_left(rising, -self._ring[place]))
        insort(rising, -length)
        self._ring[place] = length
        self._num += 1

    @property
    def num_noted(self) -> int:
        """How many have ended so far."""
        return self._num

    @property
    def mean(self) -> float | None:
        """Their mean length, without any that was assumed; None before the first has ended."""
        return self._sum / min(self._num, WINDOW) if self._num else None

    def mean_remaining(self, written: Counts, going: Counts) -> NDArray[np.float64]:
        """Tokens for which sequences go on in the mean that have `written` so many each, float64 [n], without any that was assumed; NaN where
        none that was longer is known. Those that have written `going` so many, int64 [k], and go on count as longer than that: what has
        ended yet is the short part of what came (Kaplan and Meier, 1958). Beyond the longest that ended, outputs end at one rate."""
        ended = np.sort(np.array(self._ring[: min(self._num, WINDOW)], np.int64))
        if not len(ended):
            return np.full(len(written), np.nan)
        # Of those that came to each of these lengths, one ended there.
        reached = np.arange(len(ended), 0, -1) + len(going) - np.sort(going).searchsorted(ended)
        lasting = np.concatenate([[1.0], np.multiply.accumulate(1.0 - 1.0 / reached)])
        tail = (ended.sum() + going.sum()) / len(ended) * lasting[-1]
        # Mean tokens that come after each length, of all that ever began.
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
        """Tokens that sequences are taken to go on for, which have `written` so many each, int64 [n]; less than 1 for one of which
        nothing is known but that it ends at once."""
        unwritten = -written
        rising = np.frombuffer(self._rising, np.int64)
        # The first length that at most the share 1 - quantile of those that are longer than `written` is longer than.
        longer = rising.searchsorted(unwritten)
        unwritten -= rising[((1.0 - quantile) * longer).astype(np.int64)]
        return unwritten
