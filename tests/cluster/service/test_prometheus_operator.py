"""What Prometheus Operator makes of our monitors and rules works in Prometheus as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.service.beside import kubeconfig
from cluster.service.discovering import granted, started
from cluster.service.prometheus_operator import configuration, prometheus_operator, rules
from cluster.service.release import Release
from cluster.service.space import Space

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_the_operators_configuration_scrapes_gates_and_operator_and_loads_the_rules(
    release: Release, space: Space, tmp_path: Path
) -> None:
    node, one = space.node, f'namespace="{space.name}",inferenceservice="watched"'

    def is_applied() -> bool:
        return bool(space.condition("watched", "MonitoringReady")["reason"] == "PodMonitorApplied")

    def jobs() -> set[str]:
        return {job["job_name"] for job in configuration(node, space.name)["scrape_configs"]}

    space.serve(space.tiny("watched"))
    with prometheus_operator(release, tmp_path, space.name):
        release.install()  # now that the kinds are there it brings rules and a monitor
        node.wait_for("the PodMonitor", is_applied, 120)  # kinds are looked for once a minute
        wanted = {
            f"podMonitor/{space.name}/watched/0",
            f"serviceMonitor/{release.namespace}/{release.name}-operator/0",
        }
        node.wait_for("the configuration", lambda: wanted <= jobs(), 60)
        node.wait_for("the rules", lambda: rules(node, space.name)["groups"], 60)

        account = granted(node, space.name, "pods", "services", "endpoints", "endpointslices", "namespaces")
        config = outside(configuration(node, space.name), kubeconfig(node, tmp_path, space.name, account))
        with started(tmp_path, config, rules(node, space.name)) as watcher:

            def seen(expression: str) -> bool:
                return bool(watcher.query(expression))

            node.wait_for("the gate", lambda: seen(f'up{{{one},container="gate"}} == 1'))
            assert seen(f"sluice_gate_is_open{{{one}}} == 1") or seen(f'{{__name__=~"sluice_gate_.+",{one}}}')
            node.wait_for("the promise", lambda: seen(f"sluice:objective:ratio{{{one}}} == 0.99"))
            node.wait_for("the operator", lambda: seen(f"sluice_operator_service_available{{{one}}} == 1"), 90)
            assert watcher.failed_rules() == []
            node.wait_for("no alert to be pending", lambda: not seen(f"ALERTS{{{one}}}"))
            loaded = watcher.get("/api/v1/rules", type="alert")["data"]["groups"]
            names = {rule["name"] for group in loaded for rule in group["rules"]}
            assert {"SluicePreemptionStorm", "SluiceGateNotScraped", "SluiceOperatorDown"} <= names


def outside(config: dict[str, Any], account: Path) -> dict[str, Any]:
    """The same for a Prometheus that is no pod: it signs in with a file, and nobody fills in what pods are told."""
    text = json.dumps(config).replace("$(POD_NAME)", "prometheus-0").replace("$(SHARD)", "0")
    loaded: dict[str, Any] = json.loads(text)
    for job in loaded["scrape_configs"]:
        for found in job["kubernetes_sd_configs"]:
            found["kubeconfig_file"] = str(account)
    return loaded
