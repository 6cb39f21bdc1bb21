"""A node that enforces NetworkPolicies: kube-router's controller of them, since the node's own network does not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.service.beside import program, running
from cluster.testnode.boot import NODE, SERVICES
from cluster.testnode.cluster import Cluster

# Pods of one node talk over a bridge; only with this does their traffic pass the rules at all.
BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
CLEAN = ("--cleanup-config",)


@contextmanager
def enforcing(node: Cluster, folder: Path) -> Iterator[None]:
    """The node while it enforces, for IPv4."""
    words = [
        program("kube-router"),
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        f"--kubeconfig={node.run}/kubeconfig",
        f"--hostname-override={NODE}",
        f"--service-cluster-ip-range={SERVICES}",
        "--enable-ipv6=false",  # its rules for IPv6 name sets that it made under another name, and are refused whole
        "--health-port=0",
        "--iptables-sync-period=1m",
    ]
    was = BRIDGED.read_text()
    BRIDGED.write_text("1")
    try:
        with running(folder, "kube-router", words):
            yield
    finally:
        subprocess.run([program("kube-router"), *CLEAN], cwd=folder, capture_output=True, check=False, timeout=60)
        BRIDGED.write_text(was)
