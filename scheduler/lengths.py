"""How long outputs become: a guess from the lengths of those that have ended.

Knows output lengths, and nothing of the requests that had them: the prompt's length says little. Does not know memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

WINDOW = 1000
BEYOND = 16
"""Tokens that an output is taken to go on for when it is longer than any that is known."""


class OutputLengths:
    """The last WINDOW output lengths, and one at the cap.

    Of those that were longer than g tokens when a sequence has written g, the share `quantile` ended within the answer. The one at the
    cap stands for all that was never seen.
    """

    def __init__(self, cap: int) -> None:
        """`cap`: tokens that an output has at most."""
        self._cap = cap
        self._ring = np.empty(WINDOW, np.int64)
        self._num = 0
        self._rising: Counts | None = None

    def note(self, length: int) -> None:
        """A sequence has ended after so many output tokens."""
        self._ring[self._num % WINDOW] = length
        self._num += 1
        self._rising = None

    @property
    def num_noted(self) -> int:
        """How many have ended so far."""
        return self._num

    def remaining(self, written: Counts, quantile: float) -> Counts:
        """Tokens that sequences are taken to go on for, which have `written` so many each, int64 [n]; at least 1."""
        if self._rising is None:
            known = self._ring[: min(self._num, WINDOW)]
            self._rising = np.sort(np.append(known, self._cap))
        rising = self._rising
        num = len(rising)
        longer = num - rising.searchsorted(written, "right")
        # The first length that at most the share 1 - quantile of those is longer than.
        places = num - 1 - ((1.0 - quantile) * longer).astype(np.int64)
        # Nobody is that short: with nothing known of its end, a sequence is taken to end at once.
        ends = np.where(places < 0, 0, rising[places])
        return np.where(longer > 0, np.maximum(ends - written, 1), BEYOND)
