from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from sluice_sidecar.telemetry.instruments import FastCounter, FastHistogram


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("values", [[], [0.5], [0.1, 0.1, 0.2, 7.0], [0.05, 1.0, 1.0001]], ids=str)
def test_a_fast_histogram_reads_like_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    described: dict[str, Any] = {"name": "wait_seconds", "documentation": "Waited.", "buckets": (0.1, 0.5, 1)}
    fast, slow = FastHistogram(registry=ours, **described), Histogram(registry=theirs, **described)

    for value in values:
        fast.observe(value)
        slow.observe(value)

    assert page(ours) == page(theirs)


def test_a_fast_counter_reads_like_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastCounter("sent_bytes_total", "Sent.", registry=ours)
    slow = Counter("sent_bytes_total", "Sent.", registry=theirs)

    fast.value += 3
    slow.inc(3)

    assert page(ours) == page(theirs)


def test_a_name_is_given_once() -> None:
    registry = CollectorRegistry()
    FastCounter("sent_bytes_total", "Sent.", registry=registry)

    with pytest.raises(ValueError, match="Duplicated"):
        Counter("sent_bytes_total", "Sent.", registry=registry)
