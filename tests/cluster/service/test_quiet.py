"""The operator beside a service that serves: quiet while nothing happens, prompt when something does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

OWNED = "deployments,services,configmaps,serviceaccounts"


@pytest.fixture
def operator_pod(release: Release) -> str:
    (pod,) = [one for one in release.node.list("pods", release.namespace) if "operator" in one["metadata"]["name"]]
    name: str = pod["metadata"]["name"]
    return name


def writes(release: Release, pod: str) -> dict[str, float]:
    """The operator's own count of its writes, by what was written."""
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod}:8081/proxy/metrics"
    page = release.node.kubectl("get", "--raw", path)
    counts = re.findall(r'^sluice_operator_api_writes_total{what="(\w+)"} (\S+)$', page, re.MULTILINE)
    return {what: float(count) for what, count in counts}


def versions(space: Space) -> dict[str, str]:
    """The resourceVersion of everything that the operator writes."""
    kinds = f"{KIND},{OWNED}"
    return {f"{one['kind']}/{one['metadata']['name']}": version(one) for one in space.node.list(kinds, space.name)}


def version(item: Object) -> str:
    return str(item["metadata"]["resourceVersion"])


def seconds(total: int) -> Iterator[None]:
    """An observation window: what is claimed is that nothing happens in it."""
    until = time.monotonic() + total
    while time.monotonic() < until:
        time.sleep(1)
        yield


def test_an_idle_operator_writes_nothing_in_a_minute_and_stays_small(
    space: Space, release: Release, operator_pod: str
) -> None:
    space.serve(space.tiny("quiet"))
    for _ in seconds(15):  # the last numbers after the start
        pass

    before, seen = writes(release, operator_pod), versions(space)
    for _ in seconds(60):
        pass

    assert writes(release, operator_pod) == before
    assert versions(space) == seen
    status = release.node.kubectl("-n", release.namespace, "exec", operator_pod, "--", "cat", "/proc/1/status")
    (resident_kib,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert int(resident_kib) < 150 * 1024


def test_drift_heals_and_what_is_deleted_comes_back(space: Space) -> None:
    space.apply({**space.tiny("drifting"), "spec": {**space.tiny("drifting")["spec"], "replicas": 0}})
    space.wait("drifting", "condition=Degraded=False")
    before = space.get("service", "drifting")["metadata"]["uid"]

    space.kubectl("patch", "deployment", "drifting", "--type=merge", "-p", '{"spec":{"revisionHistoryLimit":9}}')
    space.kubectl("delete", "service", "drifting")

    space.wait_for("deployment/drifting", "jsonpath={.spec.revisionHistoryLimit}=2")
    space.kubectl("wait", "service/drifting", "--for=create", "--timeout=60s")
    assert space.get("service", "drifting")["metadata"]["uid"] != before


def test_an_object_of_somebody_else_is_left_alone_and_named(space: Space) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    space.apply(theirs)
    space.apply({**space.tiny("taken"), "spec": {**space.tiny("taken")["spec"], "replicas": 0}})

    space.wait("taken", "jsonpath={.status.failure.reason}=NameTaken")
    assert space.get("service", "taken")["spec"]["selector"] == {"app": "theirs"}

    space.kubectl("delete", "service", "taken")
    space.wait_for(f"{KIND}/taken", "condition=Degraded=False")
    assert space.get("service", "taken")["spec"]["selector"] == {"sluice.dev/inferenceservice": "taken"}
