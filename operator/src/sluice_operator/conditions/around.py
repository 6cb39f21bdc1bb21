"""Whether Prometheus is told to scrape a service's pods, as a condition. Pure. Next: `status.py`."""

from __future__ import annotations

from collections.abc import Container

from sluice_operator.claim import Claim
from sluice_operator.spec import ServiceSpec
from sluice_operator.surroundings import POD_MONITOR


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
