"""Prometheus Operator beside a test, and what it makes of the objects that tell it whom to scrape."""

from __future__ import annotations

import base64
import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster.service.beside import account, kubeconfig, program, running
from cluster.service.release import Release
from cluster.testnode import definitions
from cluster.testnode.cluster import Cluster, Object
from cluster.testnode.progress import Progress

ACCOUNT = "prometheus-operator"
GROUP = "monitoring.coreos.com"
NAME = "everything"
# Helm cannot upgrade a release that has objects of a kind that is gone.
WITHOUT = ("--set=monitoring.rules.install=Disabled", "--set=monitoring.serviceMonitor=Disabled")


@contextmanager
def prometheus_operator(release: Release, folder: Path, namespace: str) -> Iterator[None]:
    """The operator with its own rights, and a Prometheus in that namespace that wants all that there is."""
    node = release.node
    manifests = definitions.ensure(Progress(sys.stderr), definitions.PROMETHEUS_OPERATOR)
    files = [word for file in sorted(manifests.rglob("*.yaml")) for word in ("-f", str(file))]
    # Too large for the annotation in which `apply` on the client's side keeps what it applied.
    node.kubectl("apply", "--server-side", *files, timeout_s=120)
    try:
        crds = [f"crd/{kind}.{GROUP}" for kind in ("podmonitors", "prometheuses", "prometheusrules", "servicemonitors")]
        node.kubectl("wait", "--for=condition=Established", *crds, "--timeout=60s", timeout_s=70)
        node.apply(*account(node, namespace, ACCOUNT))
        config = kubeconfig(node, folder, namespace, ACCOUNT)
        words = [program("prometheus-operator"), "--web.listen-address=127.0.0.1:0", "--kubelet-endpoints=false"]
        with running(folder, "prometheus-operator", words, {"KUBECONFIG": str(config)}):
            node.apply(_prometheus(), namespace=namespace)
            yield
    finally:
        release.install(*WITHOUT)
        node.kubectl("delete", *files, timeout_s=180)
        release.install()


def configuration(node: Cluster, namespace: str) -> dict[str, Any]:
    """What the operator would have its Prometheus run with.

    Raises:
        Refused: it has made none yet.
    """
    packed = node.get("secret", f"prometheus-{NAME}", namespace)["data"]["prometheus.yaml.gz"]
    loaded: dict[str, Any] = yaml.safe_load(gzip.decompress(base64.b64decode(packed)))
    return loaded


def rules(node: Cluster, namespace: str) -> dict[str, Any]:
    """The groups of all rule files that it made."""
    groups = []
    for found in node.list("configmaps", namespace, f"prometheus-name={NAME}"):
        for text in found["data"].values():
            groups += yaml.safe_load(text)["groups"]
    return {"groups": groups}


def _prometheus() -> Object:
    everything: Object = {}
    for kind in ("podMonitor", "serviceMonitor", "rule"):
        everything |= {f"{kind}Selector": {}, f"{kind}NamespaceSelector": {}}
    spec = {**everything, "scrapeInterval": "2s", "evaluationInterval": "2s", "scrapeTimeout": "2s", "replicas": 0}
    return {"apiVersion": f"{GROUP}/v1", "kind": "Prometheus", "metadata": {"name": NAME}, "spec": spec}
