"""The NetworkPolicy of a service, enforced: who reaches which port of its pods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.service.enforcing import enforcing
from cluster.service.space import Space
from cluster.testnode.cluster import Cluster, Refused

pytestmark = [pytest.mark.cluster, pytest.mark.full]

REQUESTS, ADMIN = 8080, 9090
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


class Elsewhere:
    """A pod of some namespace that tries to connect."""

    def __init__(self, node: Cluster, namespace: str) -> None:
        self._node, self._namespace = node, namespace
        security = {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {
            "name": "probe",
            "image": "sluice.test/sluice-sidecar:dev",
            "command": ["sleep", "3600"],
            "securityContext": security,
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        node.apply(pod, namespace=namespace)
        node.kubectl("-n", namespace, "wait", "pod/probe", "--for=condition=Ready", "--timeout=60s", timeout_s=70)

    def reaches(self, host: str, port: int) -> bool:
        """Whether a connection is taken."""
        words = ("exec", "probe", "--", "python3", "-c", PROBE, host, str(port))
        try:
            self._node.kubectl("-n", self._namespace, *words)
        except Refused as refused:
            if not re.search("timed out|refused|TimeoutError", str(refused)):
                raise
            return False
        return True


@contextmanager
def monitoring(node: Cluster) -> Iterator[Elsewhere]:
    """A pod of the namespace that the chart takes for that of Prometheus."""
    name = "monitoring"
    node.kubectl("create", "namespace", name)
    try:
        node.wait_for("its default ServiceAccount", lambda: node.get("serviceaccount", "default", name))
        yield Elsewhere(node, name)
    finally:
        node.kubectl("delete", "namespace", name, "--timeout=60s", timeout_s=70)


def test_everybody_reaches_the_requests_port_and_only_monitoring_the_admin_port(space: Space, tmp_path: Path) -> None:
    space.serve(space.tiny("guarded"))
    (pod,) = space.pods("guarded")
    host = pod["status"]["podIP"]
    with space.node.namespace("strangers") as strangers, monitoring(space.node) as prometheus:
        stranger = Elsewhere(space.node, strangers)
        assert stranger.reaches(host, ADMIN), "nobody enforces anything yet"

        with enforcing(space.node, tmp_path):
            space.node.wait_for(f"{host}:{ADMIN} to be shut", lambda: not stranger.reaches(host, ADMIN))
            assert stranger.reaches(host, REQUESTS)
            assert prometheus.reaches(host, REQUESTS)
            assert prometheus.reaches(host, ADMIN)
            # The kubelet's probes and the operator go on: it is still what it was.
            space.kubectl("annotate", "inferenceservices.sluice.dev/guarded", "sluice.test/touched=1")
            space.wait("guarded", "condition=Ready")
            after = space.get("pod", pod["metadata"]["name"])["status"]["containerStatuses"]
            assert [one["restartCount"] for one in after] == [0]
