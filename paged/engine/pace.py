"""An estimate of a step's time from past steps: seconds for the step, and for each token that it computes.

    seconds ≈ a + b · tokens        least squares; a step's weight halves after about 70 later ones

Time between two steps (messages, deliveries) counts to the second one while there are requests, because they wait for
it, too.
"""

from __future__ import annotations

KEPT = 0.99
"""The factor of a step's weight with each later step."""


class Pace:
    """Least squares over steps, in which later steps weigh more."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._latest: float | None = None

    def rest(self) -> None:
        """Note that there is nothing to do: the time until the next step does not count."""
        self._latest = None

    def note(self, tokens: int, began: float, ended: float) -> None:
        """Note a step's computed tokens, and its times in seconds; a step without tokens does not count."""
        seconds = ended - (began if self._latest is None else self._latest)
        self._latest = ended
        if not tokens:
            return
        self._n = self._n * KEPT + 1.0
        self._x = self._x * KEPT + tokens
        self._y = self._y * KEPT + seconds
        self._xx = self._xx * KEPT + tokens * tokens
        self._xy = self._xy * KEPT + tokens * seconds

    def coefficients(self) -> tuple[float, float]:
        """Return seconds per step and seconds per token, neither below 0; (0, 0) before the first step."""
        if not self._n or not self._x:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * self._n * self._xx:
            # All steps alike: their time cannot be divided between step and tokens.
            return 0.0, self._y / self._x
        each = (self._n * self._xy - self._x * self._y) / spread
        step = (self._y - each * self._x) / self._n
        if each < 0:
            return self._y / self._n, 0.0
        if step < 0:
            return 0.0, self._xy / self._xx
        return step, each

    def seconds(self, steps: float, tokens: float) -> float:
        """Return the seconds of so many steps that compute so many tokens in all."""
        step, each = self.coefficients()
        return step * steps + each * tokens
