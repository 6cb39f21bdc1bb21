"""KEDA itself beside a test: its operator, and the server of metrics that HPAs ask through the API server."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.service.beside import certificate, free_port, kubeconfig, program, running
from cluster.testnode import definitions
from cluster.testnode.boot import NODE_IP
from cluster.testnode.cluster import Cluster
from cluster.testnode.progress import Progress

NAMESPACE = ACCOUNT = "keda"  # KEDA's manifests name them so: the namespace, and keda-operator in it
API = "v1beta1.external.metrics.k8s.io"
SERVER = "keda-metrics-apiserver"
READY_WITHIN = "--timeout=90s"


@contextmanager
def keda(node: Cluster, folder: Path) -> Iterator[Path]:
    """KEDA with its own definitions and rights, serving; the log of its operator."""
    manifests = definitions.ensure(Progress(sys.stderr), definitions.KEDA)
    files = [word for file in sorted(manifests.rglob("*.yaml")) for word in ("-f", str(file))]
    node.apply(*_namespace())
    node.kubectl("apply", "--server-side", *files)
    try:
        crds = [f"crd/{name}.keda.sh" for name in ("scaledobjects", "scaledjobs", "triggerauthentications")]
        node.kubectl("wait", "--for=condition=Established", *crds, READY_WITHIN, timeout_s=100)
        with _programs(node, folder) as log:
            yield log
    finally:
        node.kubectl("delete", "apiservice", API, "--ignore-not-found")
        # Those of a test that failed: nobody would take their finalizers away any more.
        for left in node.list("scaledobjects.keda.sh"):
            where = ("-n", left["metadata"]["namespace"], "scaledobjects.keda.sh", left["metadata"]["name"])
            node.kubectl("patch", *where, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
        node.kubectl("delete", *files, "--ignore-not-found", timeout_s=120)
        node.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@contextmanager
def _programs(node: Cluster, folder: Path) -> Iterator[Path]:
    certificate(folder, f"DNS:{SERVER}.{NAMESPACE}.svc", "IP:127.0.0.1")
    config = kubeconfig(node, folder, NAMESPACE, "keda-operator")
    environment = {"KUBECONFIG": str(config), "POD_NAMESPACE": NAMESPACE, "WATCH_NAMESPACE": ""}
    environment["KEDA_CLUSTER_OBJECT_NAMESPACE"] = NAMESPACE
    inner, outer = free_port(), free_port()
    operator = [
        program("keda-operator"),
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        f"--metrics-service-bind-address=127.0.0.1:{inner}",
        f"--cert-dir={folder}",
    ]
    adapter = [
        program("keda-adapter"),
        f"--secure-port={outer}",
        f"--port={free_port()}",
        f"--metrics-service-address=127.0.0.1:{inner}",
        f"--lister-kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--tls-cert-file={folder}/tls.crt",
        f"--tls-private-key-file={folder}/tls.key",
        f"--cert-dir={folder}",
    ]
    with (
        running(folder, "keda-operator", operator, environment) as log,
        running(folder, "keda-adapter", adapter, environment),
    ):
        node.apply(*_metrics_api((folder / "ca.crt").read_bytes(), outer))
        node.kubectl("wait", "--for=condition=Available", f"apiservice/{API}", READY_WITHIN, timeout_s=100)
        yield log


def _namespace() -> list[dict[str, object]]:
    account = {"name": "keda-operator", "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
    ]


def _metrics_api(ca: bytes, port: int) -> list[dict[str, object]]:
    """How the API server finds the adapter: a Service whose endpoint is the process on the node."""
    named = {"name": SERVER, "namespace": NAMESPACE}
    service = {"spec": {"ports": [{"name": "https", "port": 443}]}, "metadata": named}
    endpoints = {
        "metadata": {**named, "labels": {"kubernetes.io/service-name": SERVER}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": port}],
        "endpoints": [{"addresses": [NODE_IP]}],
    }
    api = {
        "metadata": {"name": API},
        "spec": {
            "service": named,
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "caBundle": base64.b64encode(ca).decode(),
        },
    }
    return [
        {"apiVersion": "v1", "kind": "Service", **service},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **endpoints},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", **api},
    ]
