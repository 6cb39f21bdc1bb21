"""What lies around a service's pods: how far they may be disrupted, who may reach them, who is told to scrape them.

Owns PodDisruptionBudget, NetworkPolicy and PodMonitor, and which optional objects there are. Nothing here is part of a
pod's template, so that a change of the operator's settings restarts no pod. Pure. Next: `render.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sluice_operator.rendering.autoscale import SCALED_OBJECT, scaled_object
from sluice_operator.rendering.labels import SERVICE_LABEL, selector
from sluice_operator.rendering.ownership import metadata
from sluice_operator.rendering.pod_template import Object
from sluice_operator.resource.spec import ServiceSpec

POD_MONITOR = "PodMonitor"
_NAMESPACE_NAME = "kubernetes.io/metadata.name"  # the API server itself puts it on every namespace
_GATE_PORT, _ADMIN_PORT = 8080, 9090


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the operator was told and has found about the cluster around the pods."""

    network_policy: bool = True
    """Whether a NetworkPolicy guards the pods."""
    admin_namespaces: tuple[str, ...] = ("monitoring", "sluice-system")
    """Namespaces from which port 9090 may be reached: who scrapes, and the operator."""
    pod_monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which a Prometheus selects its PodMonitors."""
    prometheus_url: str = ""
    """Where KEDA asks for the gates' demand; empty: nowhere, so that there is nothing to scale by."""
    kinds: frozenset[str] = frozenset()
    """The optional kinds that the API server has; objects of another one are not rendered."""


def around(spec: ServiceSpec, surroundings: Surroundings) -> Iterator[Object]:
    """The objects around the pods of a service."""
    yield _disruption_budget(spec)
    if surroundings.network_policy:
        yield _network_policy(spec, surroundings.admin_namespaces)
    if spec.autoscaling and SCALED_OBJECT in surroundings.kinds and surroundings.prometheus_url:
        yield scaled_object(spec, spec.autoscaling, surroundings.prometheus_url)
    if spec.pod_monitor and POD_MONITOR in surroundings.kinds:
        yield _pod_monitor(spec, surroundings.pod_monitor_labels)


def _disruption_budget(spec: ServiceSpec) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(spec, spec.name),
        "spec": {
            # One at a time. Counted from above, so that a service of one replica never blocks the drain of a node: its
            # pod ends its streams first, as every pod does.
            "maxUnavailable": 1,
            # A pod that does not serve protects nobody, and on a broken node it would never get ready again.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(spec)},
        },
    }


def _network_policy(spec: ServiceSpec, admin_namespaces: tuple[str, ...]) -> Object:
    # The kubelet needs no rule: what comes from the pod's own node is always let in.
    ingress: list[Object] = [{"ports": [{"protocol": "TCP", "port": _GATE_PORT}]}]
    if admin_namespaces:  # an empty list of peers would mean everybody
        among = {"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(set(admin_namespaces))}
        peers = [{"namespaceSelector": {"matchExpressions": [among]}}]
        ingress.append({"from": peers, "ports": [{"protocol": "TCP", "port": _ADMIN_PORT}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(spec, spec.name),
        "spec": {"podSelector": {"matchLabels": selector(spec)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _pod_monitor(spec: ServiceSpec, labels: Mapping[str, str]) -> Object:
    written = metadata(spec, spec.name)
    written["labels"] = {**labels, **written["labels"]}
    from_label = "__meta_kubernetes_pod_label_" + "".join(char if char.isalnum() else "_" for char in SERVICE_LABEL)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": POD_MONITOR,
        "metadata": written,
        "spec": {
            "selector": {"matchLabels": selector(spec)},
            "podMetricsEndpoints": [
                {
                    "port": "admin",
                    "path": "/metrics",
                    # Rules and dashboards group by it.
                    "relabelings": [{"sourceLabels": [from_label], "targetLabel": "inferenceservice"}],
                }
            ],
        },
    }
