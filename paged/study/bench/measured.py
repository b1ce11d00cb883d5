"""A figure that was measured several times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec


class Measured(msgspec.Struct, frozen=True):
    """The median, the least and the most, in the unit that the field's name says."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Of at least one value."""
        return cls(float(median(values)), float(min(values)), float(max(values)))

    def __format__(self, form: str) -> str:
        """Return the median, followed by the least and the most where they differ as printed."""
        middle, least, most = (format(value, form) for value in (self.median, self.least, self.most))
        return middle if least == most else f"{middle} ({least} to {most})"
