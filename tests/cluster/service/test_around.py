"""The objects around the pods, as the API server takes them and as they come back."""

from __future__ import annotations

import functools

import pytest

from cluster.service.release import Release
from cluster.service.space import Space

pytestmark = pytest.mark.cluster


def is_another(space: Space, kind: str, old: str) -> bool:
    found: str = space.get(kind, "around")["metadata"]["uid"]
    return found != old


def test_budget_and_network_policy_are_made_and_come_back_when_somebody_deletes_them(
    space: Space, release: Release
) -> None:
    space.apply(space.tiny("around", replicas=0))
    space.wait("around", "condition=Available=false")

    budget = space.get("poddisruptionbudget", "around")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    everybody, named = space.get("networkpolicy", "around")["spec"]["ingress"]
    assert [port["port"] for port in everybody["ports"]] == [8080]
    (among,) = named["from"][0]["namespaceSelector"]["matchExpressions"]
    assert among["values"] == sorted(["monitoring", release.namespace])
    account = space.get("serviceaccount", "around")
    assert account["automountServiceAccountToken"] is False
    service = space.get("service", "around")["spec"]
    assert service["ipFamilyPolicy"] == "PreferDualStack"
    assert len(service["ipFamilies"]) == len(service["clusterIPs"])

    for kind in ("poddisruptionbudget", "networkpolicy"):
        old = space.get(kind, "around")["metadata"]["uid"]
        space.kubectl("delete", kind, "around")
        space.node.wait_for(f"a new {kind}", functools.partial(is_another, space, kind, old))

    ready = space.condition("around", "MonitoringReady")
    if "podmonitors" in space.node.kubectl("api-resources", "--api-group=monitoring.coreos.com", "-o", "name"):
        assert ready["reason"] == "PodMonitorApplied"
    else:
        assert (ready["status"], ready["reason"]) == ("False", "PodMonitorMissing")
