"""Which warnings `kubectl sluice why` tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

import operator_scene as scene
from sluice_operator.status.noise import explains
from sluice_sidecar.telemetry.state import GateState

LOADING = scene.gate_state(phase="loading", is_open=False, why_shut="not_ready")
READY = scene.gate_state()
NOT_READY = scene.pod(ready=False)
READINESS = "Readiness probe failed: HTTP probe failed with statuscode: 503"
STARTUP = "Startup probe failed: dial tcp 10.0.0.1:9090: connect: connection refused"
LIVENESS = "Liveness probe failed: context deadline exceeded"


def unhealthy(message: str) -> scene.Json:
    return {"reason": "Unhealthy", "message": message, "lastTimestamp": "2026-01-01T00:07:00Z"}


def serves_since(time: str) -> scene.Json:
    pod = scene.pod()
    pod["status"]["conditions"][0]["lastTransitionTime"] = time
    return pod


@pytest.mark.parametrize(
    ("pod", "gate", "event"),
    [
        pytest.param(NOT_READY, LOADING, unhealthy(READINESS), id="not ready while it loads"),
        pytest.param(NOT_READY, LOADING, unhealthy(STARTUP), id="not started while it loads"),
        pytest.param(serves_since("2026-01-01T00:07:30Z"), READY, unhealthy(READINESS), id="before it was ready"),
        pytest.param(NOT_READY, replace(READY, draining=True), unhealthy(READINESS), id="drained by hand"),
        pytest.param(scene.pod(ready=False, deleting=True), None, unhealthy(READINESS), id="while it leaves"),
        pytest.param(scene.pod(ready=False, deleting=True), None, unhealthy(LIVENESS), id="any probe while it leaves"),
        pytest.param(scene.pod(), READY, {"reason": "MissingClusterDNS"}, id="a node without a DNS of the cluster"),
        pytest.param(
            NOT_READY, None, {"reason": "DNSConfigForming"}, id="a node with more name servers than pods take"
        ),
    ],
)
def test_noise_is_left_out(pod: scene.Json, gate: GateState | None, event: scene.Json) -> None:
    assert not explains(event, pod, gate)


@pytest.mark.parametrize(
    ("pod", "gate", "event"),
    [
        pytest.param(NOT_READY, LOADING, unhealthy(LIVENESS), id="hung while it loads"),
        pytest.param(serves_since("2026-01-01T00:06:00Z"), READY, unhealthy(READINESS), id="since it was ready"),
        pytest.param(scene.pod(), READY, unhealthy(READINESS), id="nobody knows since when it is ready"),
        pytest.param(NOT_READY, READY, unhealthy(READINESS), id="loaded, and not ready"),
        pytest.param(NOT_READY, None, unhealthy(READINESS), id="not ready, and the gate is silent"),
        pytest.param(None, None, unhealthy(READINESS), id="a pod that could not be read"),
        pytest.param(scene.pod(ready=False, deleting=True), None, {"reason": "FailedKillPod"}, id="it cannot leave"),
        pytest.param(NOT_READY, LOADING, {"reason": "FailedMount"}, id="whatever else"),
    ],
)
def test_what_may_explain_is_told(pod: scene.Json | None, gate: GateState | None, event: scene.Json) -> None:
    assert explains(event, pod, gate)
