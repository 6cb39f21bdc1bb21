"""The operator beside a service that serves: quiet while nothing happens, prompt when something does."""

from __future__ import annotations

import datetime as dt
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
    given_away = "sluice.dev/inferenceservice=other"
    space.kubectl("label", "poddisruptionbudget", "drifting", given_away, "--overwrite")
    live = space.get("configmap", "drifting-live")["data"]
    space.kubectl("patch", "configmap", "drifting-live", "--type=merge", "-p", '{"data":{"live.json":"{}"}}')

    space.wait_for("deployment/drifting", "jsonpath={.spec.revisionHistoryLimit}=2")
    space.kubectl("wait", "service/drifting", "--for=create", "--timeout=60s")
    assert space.get("service", "drifting")["metadata"]["uid"] != before
    space.node.wait_for("the file as it was", lambda: space.get("configmap", "drifting-live")["data"] == live)
    space.wait_for("pdb/drifting", "jsonpath={.metadata.labels.sluice\\.dev/inferenceservice}=drifting")


def test_words_of_any_script_arrive_as_they_were_written_and_are_not_written_twice(
    space: Space, release: Release, operator_pod: str
) -> None:
    words = {"example.com/note": "Grüße, 你好, 🙂 \u2028\u0085\ufeff: '\"\\end"}
    service = space.tiny("words", replicas=0)
    service["spec"]["podTemplate"]["annotations"] = words
    space.apply(service)
    space.wait("words", "condition=Degraded=False")
    made = space.get("deployment", "words")["spec"]["template"]
    assert words.items() <= made["metadata"]["annotations"].items()

    before = writes(release, operator_pod)["apply"]
    space.kubectl("patch", KIND, "words", "--type=merge", "-p", '{"spec":{"slo":{"timeToFirstToken":"50s"}}}')
    space.wait("words", "condition=Degraded=False")
    written = writes(release, operator_pod)["apply"] - before
    assert written == 2, "live.json and the Deployment's note of the generation, each once"
    assert space.get("deployment", "words")["spec"]["template"] == made


@pytest.mark.parametrize("kind", ["service", "deployment"])
def test_an_object_of_somebody_else_is_left_alone_and_named(space: Space, kind: str) -> None:
    pod = {"metadata": {"labels": {"app": "theirs"}}, "spec": {"containers": [{"name": "theirs", "image": "theirs"}]}}
    theirs = {
        "service": {"apiVersion": "v1", "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}},
        "deployment": {
            "apiVersion": "apps/v1",
            "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "theirs"}}, "template": pod},
        },
    }[kind]
    space.apply({**theirs, "kind": kind.capitalize(), "metadata": {"name": "taken"}})
    before = space.get(kind, "taken")["spec"]
    space.apply({**space.tiny("taken"), "spec": {**space.tiny("taken")["spec"], "replicas": 0}})

    space.wait("taken", "jsonpath={.status.failure.reason}=NameTaken")
    assert f"{kind.capitalize()} taken exists" in space.status("taken")["failure"]["message"]
    assert space.condition("taken", "Stalled")["reason"] == "NameTaken"
    assert space.get(kind, "taken")["spec"] == before

    space.kubectl("delete", kind, "taken")
    space.wait_for(f"{KIND}/taken", "condition=Degraded=False")
    assert space.get(kind, "taken")["spec"] != before


def test_a_namespace_that_is_deleted_takes_its_services_with_it_in_peace(space: Space, release: Release) -> None:
    began = dt.datetime.now(dt.UTC)
    with space.node.namespace("ending") as name:
        service = space.tiny("ending")
        space.node.apply({**service, "spec": {**service["spec"], "replicas": 0}}, namespace=name)
        ready = ["--for=condition=Degraded=False", "--timeout=120s"]
        space.node.kubectl("-n", name, "wait", f"{KIND}/ending", *ready, timeout_s=150)

        space.node.kubectl("delete", "namespace", name, "--timeout=120s", timeout_s=150)

        space.node.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})  # for the fixture
    logs = space.node.kubectl(
        "-n", release.namespace, "logs", "deployment/sluice-operator", f"--since-time={began:%FT%TZ}"
    )
    assert '"level": "error"' not in logs
    assert f'"namespace": "{name}", "service": "ending", "error"' not in logs
