"""Operators as processes beside the node, with nobody else's operator in their way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cluster.testnode.cluster import Cluster
from cluster.testnode.operator_process import OperatorProcess

ROOT = Path(__file__).resolve().parents[3]
NAME = "inferenceservices.sluice.dev"
CRD = ROOT / f"crds/{NAME}.yaml"
INSTALLED = "app.kubernetes.io/part-of=sluice"

Start = Callable[..., OperatorProcess]


@pytest.fixture(scope="module")
def definition(node: Cluster) -> Iterator[Cluster]:
    """The node with our definition; what Helm installed is left to it, and what it has not is taken away again."""
    was_there = bool(node.kubectl("get", "crd", NAME, "--ignore-not-found", "-o", "name").strip())
    if not was_there:
        node.kubectl("apply", "--server-side", "-f", str(CRD))
    node.kubectl("wait", f"crd/{NAME}", "--for=condition=Established", "--timeout=60s")
    yield node
    if not was_there:
        node.kubectl("delete", "crd", NAME, "--timeout=110s", timeout_s=120)


@pytest.fixture
def alone(definition: Cluster) -> Iterator[Cluster]:
    """The time without an installed operator."""
    installed = definition.list("deployments", selector=INSTALLED)
    places = [(one["metadata"]["namespace"], one["metadata"]["name"], one["spec"]["replicas"]) for one in installed]
    for namespace, name, _ in places:
        definition.kubectl("-n", namespace, "scale", "deployment", name, "--replicas=0")
        definition.kubectl("-n", namespace, "wait", "pods", "-l", INSTALLED, "--for=delete", "--timeout=60s")
    try:
        yield definition
    finally:
        for namespace, name, replicas in places:
            definition.kubectl("-n", namespace, "scale", "deployment", name, f"--replicas={replicas}")
            definition.kubectl("-n", namespace, "rollout", "status", "deployment", name, "--timeout=120s")


@pytest.fixture
def start(alone: Cluster, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts operators of the test's namespace; those that still run at its end are ended."""
    running: list[OperatorProcess] = []

    def started(
        name: str, environment: Mapping[str, str] | None = None, credentials: Path | None = None
    ) -> OperatorProcess:
        settings = {"SLUICE_WATCH_NAMESPACES": namespace, "SLUICE_LEASE": f"{namespace}/sluice-operator"}
        settings |= {"SLUICE_IDENTITY": name, **(environment or {})}
        running.append(OperatorProcess(tmp_path / f"{name}-{len(running)}.log", settings, credentials))
        return running[-1]

    yield started
    for one in running:
        if one.process.poll() is None:
            one.kill()
        print(f"-- {one.log.name}\n{one.log.read_text()[-4000:]}")


def idle_service(name: str, **spec: object) -> str:
    """The manifest of a service that wants no pod."""
    written = {"model": {"source": {"image": {"path": "/models/tiny"}}}, "replicas": 0, **spec}
    body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}}
    return json.dumps({**body, "spec": written})


def serves(node: Cluster, namespace: str, name: str, within_s: int = 60) -> None:
    """Whether a new service is seen, carried out and told: by both clients of the operator, with its rights."""
    node.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service(name))
    where = (f"{NAME}/{name}", "--for=condition=Degraded=False", f"--timeout={within_s}s")
    node.kubectl("-n", namespace, "wait", *where, timeout_s=within_s + 30)
