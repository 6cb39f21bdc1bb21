"""The autoscaler of a service: KEDA's ScaledObject on the demand that the gates count, with a floor while pods load.

Owns what is asked of Prometheus. The demand has what was shed in it, so that a service that refuses half of its work
asks for twice the replicas; concurrency and queue lengths end where admission begins. Pure. Next: `surroundings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sluice_operator.observed import pods
from sluice_operator.plan import Observed
from sluice_operator.rendering.ownership import API_VERSION, KIND, metadata
from sluice_operator.rendering.pod_template import Object
from sluice_operator.resource.spec import Autoscaling, ServiceSpec

SCALED_OBJECT = "ScaledObject"

# Of what a pod can do within the promise. The rest carries the growth of the minutes that a new pod takes to load: a
# quarter more. docs/autoscaling.md tells it, and how to have another.
_TARGET = "0.8"
# Longer than a lull between two bursts; a pod that goes takes its prefix cache with it.
_CALM_S = 300


def floored(spec: ServiceSpec, observed: Observed) -> Autoscaling | None:
    """The bounds as they are now: nothing is taken away while pods load.

    A pod that goes before it ever served was loaded for nothing, and demand that it was meant for is still there.
    """
    if spec.autoscaling is None:
        return None
    loads = any(pod.is_current and not pod.is_ready and pod.failure is None for pod in pods.views(observed))
    if not loads:
        return spec.autoscaling
    least = min(max(spec.replicas, spec.autoscaling.min_replicas), spec.autoscaling.max_replicas)
    return replace(spec.autoscaling, min_replicas=least)


def scaled_object(spec: ServiceSpec, bounds: Autoscaling, prometheus_url: str) -> Object:
    """The ScaledObject; its target is the resource, since the operator alone sets the Deployment's replicas."""
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": SCALED_OBJECT,
        "metadata": metadata(spec, spec.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": spec.name},
            "minReplicaCount": bounds.min_replicas,
            "maxReplicaCount": bounds.max_replicas,
            # A Prometheus that does not answer is no reason to change anything.
            "fallback": {
                "failureThreshold": 3,
                "replicas": bounds.min_replicas,
                "behavior": "currentReplicas",
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": _CALM_S}}}
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "name": name,
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": prometheus_url,
                        "query": query,
                        "threshold": _TARGET,
                        # Nothing to be read is no demand of nothing.
                        "ignoreNullValues": "false",
                    },
                }
                for name, query in _queries(spec)
            ],
        },
    }


def _queries(spec: ServiceSpec) -> Iterator[tuple[str, str]]:
    """Name and query: how many pods' worth of work is asked for, in tokens and in KV blocks."""
    labels = f'namespace="{spec.namespace}",inferenceservice="{spec.name}"'
    # Each piece of work counts once, however often it was sent.
    tokens = f'sum(rate(sluice_gate_demand_tokens_total{{{labels},attempt="first"}}[2m]))'
    blocks = f'sum(rate(sluice_gate_demand_block_seconds_total{{{labels},attempt="first"}}[2m]))'
    # What a pod can do is told by pods with traffic only; what they said of late goes on to hold.
    capacity = f"avg(avg_over_time(sluice_gate_capacity_tokens_per_second{{{labels}}}[10m]) > 0)"
    yield "tokens", f"({tokens} / {capacity}) or ({tokens} * 0)"
    yield "blocks", f"({blocks} / avg(sluice_engine_kv_blocks{{{labels}}} > 0)) or ({blocks} * 0)"
