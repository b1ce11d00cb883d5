"""The hardest value that still meets, out of few tries: bracketing by factors of two, then cutting the bracket."""

from collections.abc import Callable, Generator

import msgspec

Value = float
"""A rate; or a count, which is an int."""
Tries = Generator[Value, bool, tuple[Value | None, Value | None]]

FACTOR = 2
LEAN = 2 / 3
"""Where between one that met and one that missed, on a logarithmic scale, the next one lies. Nearer to the latter: there it is likelier to
miss, and what misses is given up early, while what meets runs to its end. A half would ask less often and take longer."""
REACH = 1024
"""How many times as high or as low as where it begins a rate is sought."""


class Rates(msgspec.Struct, frozen=True):
    """Rates from `start`: the higher, the harder. Two are close enough within `tolerance`, a share."""

    start: float
    tolerance: float

    def harder(self, rate: Value) -> Value | None:
        """The next harder value while none has missed; None at the end of the axis."""
        return rate * FACTOR if rate * FACTOR <= self.start * REACH else None

    def easier(self, rate: Value) -> Value | None:
        """The next easier value while none has met; None at the end of the axis."""
        return rate / FACTOR if rate / FACTOR >= self.start / REACH else None

    def between(self, met: Value, missed: Value) -> Value | None:
        """A value between the two; None where they are close enough."""
        low, high = sorted((met, missed))
        # A rate that can be read and typed.
        middle = float(f"{_towards(met, missed):.6g}")
        return middle if high > low * (1 + self.tolerance) and low < middle < high else None


class Counts(msgspec.Struct, frozen=True):
    """Counts from `fewest` to `most`: the fewer, the harder. Two are close enough when neighbours, or within `tolerance` of the larger.

    turns  where nothing easier than `start` meets, harder ones are tried, too: more is not better in every respect
    """

    start: int
    fewest: int
    most: int
    tolerance: float = 0.0
    turns: bool = False

    def harder(self, count: Value) -> Value | None:
        """The next harder value while none has missed; None at the end of the axis."""
        return None if count <= self.fewest else max(self.fewest, int(count) // FACTOR)

    def easier(self, count: Value) -> Value | None:
        """The next easier value while none has met; None at the end of the axis."""
        return None if count >= self.most else min(self.most, int(count) * FACTOR)

    def between(self, met: Value, missed: Value) -> Value | None:
        """A value between the two; None where they are close enough."""
        low, high = sorted((int(met), int(missed)))
        if high - low <= max(1, self.tolerance * high):
            return None
        return min(max(round(_towards(met, missed)), low + 1), high - 1)


Axis = Rates | Counts


def search(axis: Axis) -> Tries:
    """Yields values to try and is sent whether each met. Returns the hardest that met, and the nearest harder one that missed.

    Either is None where there is none: nothing met, or everything did up to the end of the axis. Between the two lies no value that was
    tried, and they are close enough in the axis's sense. Where the outcome rises and falls along the axis, that is one place where it
    changes, and there may be others between values that were tried.
    """
    start = axis.start
    if (yield start):
        met, missed = yield from _onward(axis.harder, start)
    else:
        met, missed = yield from _back(axis.easier, start)
        if met is None and isinstance(axis, Counts) and axis.turns:
            met, missed = yield from _back(axis.harder, start)
            if met is not None:
                met, missed = yield from _onward(axis.harder, met)
    if met is None or missed is None:
        return met, missed
    while (middle := axis.between(met, missed)) is not None:
        if (yield middle):
            met = middle
        else:
            missed = middle
    return met, missed


def _towards(met: Value, missed: Value) -> float:
    return met * (missed / met) ** LEAN


def _onward(step: Callable[[Value], Value | None], met: Value) -> Tries:
    """From a value that met, one after another until one misses."""
    while (value := step(met)) is not None:
        if not (yield value):
            return met, value
        met = value
    return met, None


def _back(step: Callable[[Value], Value | None], missed: Value) -> Tries:
    """From a value that missed, one after another until one meets."""
    while (value := step(missed)) is not None:
        if (yield value):
            return value, missed
        missed = value
    return None, missed
