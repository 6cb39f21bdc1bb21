"""The Prometheus that finds pods by itself, with the configuration of the docs, as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from charts.prometheus import Prometheus, prometheus
from cluster.service.beside import account, kubeconfig, owner, program
from cluster.service.release import CHART
from cluster.testnode.boot import NODE_IP
from cluster.testnode.cluster import Cluster

DOCS = CHART.parents[1] / "docs/monitoring.md"
FAST = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}


@contextmanager
def discovering(node: Cluster, folder: Path, namespace: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes gates and operator; pods of the node reach it too."""
    (block,) = re.findall(r"```yaml\n(rule_files.*?)```", DOCS.read_text(), re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(block)
    del config["alerting"]
    config["global"] = FAST
    signs_in = str(kubeconfig(node, folder, namespace, granted(node, namespace, "pods")))
    for job in config["scrape_configs"]:
        for found in job["kubernetes_sd_configs"]:
            found["kubeconfig_file"] = signs_in
    rules = yaml.safe_load((CHART / "files/rules/sluice.yaml").read_text())
    with started(folder, config, rules) as watcher:
        yield watcher


@contextmanager
def started(folder: Path, config: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Prometheus]:
    """The program with that configuration and those rules."""
    programs = Path(program("prometheus")).parent
    with prometheus(programs, folder, config, rules, address=f"{NODE_IP}:0") as watcher:
        yield watcher


def granted(node: Cluster, namespace: str, *resources: str) -> str:
    """A new account that may get, list and watch those everywhere, as the docs ask for; its name."""
    name = f"prometheus-{namespace}"
    may = {"apiGroups": ["", "discovery.k8s.io"], "resources": list(resources), "verbs": ["get", "list", "watch"]}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name, "ownerReferences": [owner(node, namespace)]},
        "rules": [may],
    }
    node.apply(role, *account(node, namespace, name))
    return name
