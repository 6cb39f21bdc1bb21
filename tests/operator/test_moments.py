"""Times as Kubernetes writes them."""

from __future__ import annotations

import math

import pytest

from sluice_operator.observed.moments import seconds_between


@pytest.mark.parametrize(
    ("earlier", "later", "seconds"),
    [
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z", 10),
        ("2025-12-31T23:59:00Z", "2026-01-01T00:00:00.500000Z", 60.5),
        ("2026-01-01T00:00:10Z", "2026-01-01T00:00:00Z", -10),
        ("", "2026-01-01T00:00:00Z", math.inf),
        ("2026-01-01T00:00:00Z", "tomorrow", math.inf),
    ],
)
def test_the_seconds_between_two_times(earlier: str, later: str, seconds: float) -> None:
    assert seconds_between(earlier, later) == seconds
