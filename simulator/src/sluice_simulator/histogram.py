"""Quantiles of durations in bounded memory: buckets whose edges lie 1 % apart, over whole microseconds."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

_MOST_US = 10**13


def _edges() -> tuple[int, ...]:
    edges = [0, 1]
    while edges[-1] < _MOST_US:
        edges.append(max(edges[-1] + 1, edges[-1] * 101 // 100))
    return tuple(edges)


EDGES = _edges()


class Histogram:
    """Counts of durations. A quantile is read at most 1 % high."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.max_us = 0
        self._buckets: dict[int, int] = {}

    def add(self, value_us: int, count: int = 1) -> None:
        """Count a duration, `count` times."""
        bucket = bisect_left(EDGES, value_us)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self.sum_us += value_us * count
        self.max_us = max(self.max_us, value_us)

    def add_all(self, values_us: npt.NDArray[np.int64]) -> None:
        """Count many durations, most of which are equal."""
        if not len(values_us):
            return
        first = int(values_us[0])
        if (values_us == first).all():
            self.add(first, len(values_us))
            return
        values, counts = np.unique(values_us, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.add(value, count)

    def merge(self, other: Histogram) -> None:
        """Count all that another one counted."""
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.sum_us += other.sum_us
        self.max_us = max(self.max_us, other.max_us)

    def quantile_us(self, percent: float) -> int | None:
        """The value that `percent` of those counted do not exceed; None without any."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen * 100 >= self.count * percent:
                return min(EDGES[bucket], self.max_us)
        return None
