"""Counters and histograms for the path of every token: an addition where the client library takes a lock.

Own their counts. Must not know what is counted. Fed by one thread, the loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class FastCounter(Collector):
    """A number that only grows, without labels."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self.value = 0
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Its family, for the registry's look at names."""
        yield CounterMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        """Its family, now."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class FastHistogram(Collector):
    """Values in seconds, by upper bounds, without labels."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterator[Metric]:
        """Its family, for the registry's look at names."""
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        """Its family, now."""
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
