"""What MonitoringReady says."""

from __future__ import annotations

import pytest

import operator_scene as scene
from sluice_operator.status.conditions.around import monitoring_ready

DISABLED = {"monitoring": {"podMonitor": "Disabled"}}


@pytest.mark.parametrize(
    ("changes", "kinds", "status", "reason"),
    [
        pytest.param({}, {"PodMonitor"}, "True", "PodMonitorApplied", id="where the kind is"),
        pytest.param({}, {"ScaledObject"}, "False", "PodMonitorMissing", id="where it is not"),
        pytest.param(DISABLED, {"PodMonitor"}, "Unknown", "Disabled", id="where it is not wanted"),
        pytest.param(DISABLED, set(), "Unknown", "Disabled", id="where it is neither there nor wanted"),
    ],
)
def test_it_says_whether_prometheus_is_told(changes: scene.Json, kinds: set[str], status: str, reason: str) -> None:
    claim = monitoring_ready(scene.spec(changes), kinds)

    assert (claim.status, claim.reason) == (status, reason)


def test_what_is_missing_is_named_with_what_to_do() -> None:
    text = monitoring_ready(scene.spec(), set()).message

    assert "PodMonitor (monitoring.coreos.com/v1)" in text
    assert "install the Prometheus operator" in text


def test_of_a_spec_that_is_not_understood_nothing_is_claimed() -> None:
    assert monitoring_ready(None, {"PodMonitor"}).status == "Unknown"
