"""A median and its range, as tables show them."""

from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float], form: str = ",.1f") -> str:
    """The median, and the least and the most behind it where they differ as they are written."""
    middle, least, most = (format(value, form) for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"
