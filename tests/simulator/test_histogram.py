"""Quantiles in bounded memory."""

from __future__ import annotations

import random

import pytest

from sluice_simulator.histogram import Histogram
from sluice_simulator.timeline import MOST_SLICES, Timeline


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 99.9, 100])
def test_a_quantile_is_at_most_one_percent_high_and_never_low(percent: float) -> None:
    source = random.Random(5)
    values = sorted(round(source.lognormvariate(11, 2)) for _ in range(20_001))
    histogram = Histogram()
    for value in values:
        histogram.add(value)

    exact = values[min(len(values) - 1, -(-len(values) * percent // 100) - 1).__int__()]
    found = histogram.quantile_us(percent)
    assert found is not None
    assert exact <= found <= exact * 1.01 + 1


def test_nothing_has_no_quantile() -> None:
    assert Histogram().quantile_us(50) is None


def test_many_equal_values_are_counted_at_once_and_merged() -> None:
    one, other = Histogram(), Histogram()
    one.add(7, 3)
    other.add(9)
    one.merge(other)

    assert (one.count, one.sum_us, one.max_us) == (4, 30, 9)
    assert one.quantile_us(75) == 7


def test_a_timeline_stays_small_and_loses_nothing() -> None:
    timeline = Timeline(1_000)
    for step in range(5_000):
        timeline.at(step * 1_000).arrived += 1

    assert len(timeline.slices) <= MOST_SLICES
    assert timeline.width_us == 16_000
    assert sum(one.arrived for one in timeline.slices) == 5_000
