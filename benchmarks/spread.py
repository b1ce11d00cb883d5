"""A median and its range, as tables show them."""

from collections.abc import Sequence

from paged.study.bench.workloads import Measured


def spread(values: Sequence[float], form: str = ",.1f") -> str:
    """The median, and the least and the most behind it where they differ as they are written."""
    return format(Measured.of(values), form)
