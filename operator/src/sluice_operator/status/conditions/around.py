"""MonitoringReady and Autoscaling: whether others in the cluster were told what they are needed for. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from sluice_operator.rendering.autoscale import SCALED_OBJECT
from sluice_operator.rendering.surroundings import POD_MONITOR
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status.claim import Claim


def monitoring_ready(spec: ServiceSpec | None, kinds: Container[str]) -> Claim:
    """The condition MonitoringReady; `kinds` are the optional ones whose definition the cluster has."""
    if spec is None:
        return Claim(status="Unknown", reason="NotObserved", message="Whether it is wanted is not known.")
    if not spec.pod_monitor:
        text = "monitoring.podMonitor is Disabled: something else has to scrape port 9090 of the pods."
        return Claim(status="Unknown", reason="Disabled", message=text)
    if POD_MONITOR not in kinds:
        text = (
            "The cluster has no PodMonitor (monitoring.coreos.com/v1), so nothing tells Prometheus to scrape the pods: "
            "install the Prometheus operator, or scrape port 9090 otherwise and set monitoring.podMonitor: Disabled."
        )
        return Claim(status="False", reason="PodMonitorMissing", message=text)
    text = "A PodMonitor tells the Prometheus operator to scrape the pods."
    return Claim(status="True", reason="PodMonitorApplied", message=text)


def autoscaling(spec: ServiceSpec | None, kinds: Container[str], scaled: Mapping[str, Any] | None) -> Claim | None:
    """The condition Autoscaling; None where none is asked for. `scaled` is the ScaledObject as it is now."""
    if spec is None or spec.autoscaling is None:
        return None
    if SCALED_OBJECT not in kinds:
        text = (
            "The cluster has no ScaledObject (keda.sh/v1alpha1), so nothing sets replicas by demand: install KEDA, or "
            "remove autoscaling and point another autoscaler at this resource's scale."
        )
        return Claim(status="False", reason="ScaledObjectMissing", message=text)
    if scaled is None:
        text = (
            "The operator knows no Prometheus whose demand KEDA could ask for: set the chart's autoscaling.prometheus."
        )
        return Claim(status="False", reason="PrometheusUnknown", message=text)
    return _as_keda_says(scaled, f"{spec.autoscaling.min_replicas} to {spec.autoscaling.max_replicas}")


def _as_keda_says(scaled: Mapping[str, Any], bounds: str) -> Claim:
    told = {one["type"]: one for one in scaled.get("status", {}).get("conditions") or ()}
    ready, fallback = told.get("Ready", {}), told.get("Fallback", {})
    if ready.get("status") == "False":
        text = f"KEDA says: {ready.get('message') or 'not ready'}"
        return Claim(status="False", reason="ScalerFailing", message=text)
    if fallback.get("status") == "True":
        text = f"KEDA cannot read the demand and leaves replicas as they are: {fallback.get('message') or 'no reason'}"
        return Claim(status="False", reason="DemandUnknown", message=text)
    if ready.get("status") != "True":
        text = "KEDA has not said anything of the ScaledObject yet."
        return Claim(status="Unknown", reason="NotObserved", message=text)
    text = f"KEDA sets replicas, {bounds}, by the gates' demand."
    return Claim(status="True", reason="Scaling", message=text)
