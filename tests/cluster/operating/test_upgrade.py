"""Two operators that keep templates, one after the other: no pod is replaced until its service takes the newer."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cluster.operating.conftest import Start, idle_service
from cluster.service.space import KIND
from cluster.testnode.cluster import Cluster

pytestmark = pytest.mark.cluster

NEXT_IMAGES = {
    "SLUICE_ENGINE_IMAGE": "sluice.test/sluice-engine:next",  # nobody has it: a pod that asked for it would not start
    "SLUICE_GATE_IMAGE": "sluice.test/sluice-sidecar:next",
    "SLUICE_OTLP_ENDPOINT": "http://collector.observability:4318",
}


def template(node: Cluster, namespace: str, name: str) -> Any:
    return copy.deepcopy(node.get("deployment", name, namespace)["spec"]["template"])


def runtime(node: Cluster, namespace: str, name: str) -> dict[str, str]:
    found: dict[str, str] = node.get(KIND, name, namespace)["status"].get("runtime", {})
    return found


def test_between_two_that_keep_templates_nothing_moves_until_the_newer_is_taken(
    alone: Cluster, namespace: str, start: Start
) -> None:
    first = start("first")
    alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service("chat"))
    alone.wait_for("its status", lambda: runtime(alone, namespace, "chat"))
    before = template(alone, namespace, "chat")
    assert first.end() == 0

    second = start("second", NEXT_IMAGES)
    alone.wait_for("the newer one to be named", lambda: runtime(alone, namespace, "chat")["newer"])
    assert template(alone, namespace, "chat") == before
    newer = runtime(alone, namespace, "chat")["newer"]

    taken = '{"spec":{"runtime":{"version":"' + newer + '"}}}'
    alone.kubectl("-n", namespace, "patch", KIND, "chat", "--type=merge", "-p", taken)
    alone.wait_for("it to be taken", lambda: runtime(alone, namespace, "chat") == {"version": newer})
    pod = template(alone, namespace, "chat")["spec"]
    assert pod["containers"][0]["image"] == NEXT_IMAGES["SLUICE_ENGINE_IMAGE"]
    assert len(alone.list("controllerrevisions", namespace)) == 2

    alone.kubectl("-n", namespace, "patch", KIND, "chat", "--type=json", "-p", '[{"op":"remove","path":"/spec/runtime/version"}]')  # fmt: skip  # noqa: E501
    alone.wait_for("its spec to be seen", lambda: seen(alone, namespace, "chat"))
    assert template(alone, namespace, "chat")["spec"] == pod
    assert second.metric("sluice_operator_reconciles_total") > 0


def seen(node: Cluster, namespace: str, name: str) -> bool:
    found = node.get(KIND, name, namespace)
    return bool(found["status"]["observedGeneration"] == found["metadata"]["generation"])
