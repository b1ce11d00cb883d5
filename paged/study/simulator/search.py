"""Search for the hardest value that still meets, in few trials: by factors of two to a bracket, which is then cut."""

from collections.abc import Callable, Generator

import msgspec

Value = float
"""A rate; or a count, which is an int."""
Tries = Generator[Value, bool, tuple[Value | None, Value | None]]

FACTOR = 2
LEAN = 2 / 3
"""Where the next value lies between one that met and one that missed, on a logarithmic scale. Nearer to the latter it is likelier to miss, and trials
that miss end early, while those that meet run to their end. A half would need fewer trials but more time."""
REACH = 1024
"""The farthest factor from its start, up or down, to which a search for a rate goes."""


class Rates(msgspec.Struct, frozen=True):
    """Rates from `start`: the higher, the harder. Two are close enough within `tolerance`, a share."""

    start: float
    tolerance: float

    def harder(self, rate: Value) -> Value | None:
        """Return the next harder value while none has missed; None at the end of the axis."""
        return rate * FACTOR if rate * FACTOR <= self.start * REACH else None

    def easier(self, rate: Value) -> Value | None:
        """Return the next easier value while none has met; None at the end of the axis."""
        return rate / FACTOR if rate / FACTOR >= self.start / REACH else None

    def between(self, met: Value, missed: Value) -> Value | None:
        """Return a value between the two; None if they are close enough."""
        low, high = sorted((met, missed))
        # Six figures, to read and type.
        middle = float(f"{_towards(met, missed):.6g}")
        return middle if high > low * (1 + self.tolerance) and low < middle < high else None


class Counts(msgspec.Struct, frozen=True):
    """Counts from `fewest` to `most`: the fewer, the harder. Two are close enough if neighbours, or within `tolerance` of the larger.

    turns  if nothing easier than `start` meets, harder counts are tried: more is not better in every respect
    """

    start: int
    fewest: int
    most: int
    tolerance: float = 0.0
    turns: bool = False

    def harder(self, count: Value) -> Value | None:
        """Return the next harder value while none has missed; None at the end of the axis."""
        return None if count <= self.fewest else max(self.fewest, int(count) // FACTOR)

    def easier(self, count: Value) -> Value | None:
        """Return the next easier value while none has met; None at the end of the axis."""
        return None if count >= self.most else min(self.most, int(count) * FACTOR)

    def between(self, met: Value, missed: Value) -> Value | None:
        """Return a value between the two; None if they are close enough."""
        low, high = sorted((int(met), int(missed)))
        if high - low <= max(1, self.tolerance * high):
            return None
        return min(max(round(_towards(met, missed)), low + 1), high - 1)


Axis = Rates | Counts


def search(axis: Axis) -> Tries:
    """Yield values to try, and receive whether each met. Return the hardest value that met, and the nearest harder one that missed.

    Either is None if there is none: nothing met, or everything met up to the end of the axis. No tried value lies between the two, and they are close
    enough in the axis's sense. If the outcome changes several times along the axis, this is one of the changes.
    """
    start = axis.start
    met: Value | None
    missed: Value | None
    if (yield start):
        met, missed = yield from _until(axis.harder, start, False)
    else:
        missed, met = yield from _until(axis.easier, start, True)
        if met is None and isinstance(axis, Counts) and axis.turns:
            missed, met = yield from _until(axis.harder, start, True)
            if met is not None:
                met, missed = yield from _until(axis.harder, met, False)
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


def _until(
    step: Callable[[Value], Value | None], value: Value, wanted: bool
) -> Generator[Value, bool, tuple[Value, Value | None]]:
    """Step on from a value until one meets, or misses. Return the last one before it, and it; None at the end of the axis."""
    while (following := step(value)) is not None:
        if (yield following) == wanted:
            return value, following
        value = following
    return value, None
