"""A Prometheus histogram that observes a value in a microsecond; prometheus_client's own takes a lock for each.

Belongs to one thread: a reader in another may find a value in the counts and not yet in the sum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """One series. `buckets` are rising upper bounds, each inclusive; a bucket without a bound follows them."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        labels: Mapping[str, str],
        registry: CollectorRegistry,
    ) -> None:
        assert list(buckets) == sorted(buckets), "bounds rise"
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the series as it is now; see prometheus_client."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        cumulative = [float(count) for count in accumulate(self._counts)]
        family.add_metric(list(self._labels.values()), list(zip(bounds, cumulative)), self._sum)
        return [family]
