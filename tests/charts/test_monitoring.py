"""What the chart installs for Prometheus Operator: where its kinds are, unless somebody says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from charts.helm import CHART, Helm
from charts.promtool import alerts

SERVED = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in ("PrometheusRule", "ServiceMonitor")]
OFF = ["--set=monitoring.rules.install=Disabled", "--set=monitoring.serviceMonitor=Disabled"]
ON = ["--set=monitoring.rules.install=Enabled", "--set=monitoring.serviceMonitor=Enabled"]


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        pytest.param([], set(), id="nothing where the kinds are absent"),
        pytest.param(SERVED, {"PrometheusRule", "ServiceMonitor"}, id="both where they are served"),
        pytest.param(SERVED[:1], {"PrometheusRule"}, id="one where only that is served"),
        pytest.param([*SERVED, *OFF], set(), id="nothing where it is disabled"),
        pytest.param(ON, {"PrometheusRule", "ServiceMonitor"}, id="both where it is enabled, whatever is served"),
    ],
)
def test_the_chart_installs(helm: Helm, arguments: list[str], kinds: set[str]) -> None:
    found = {one["kind"] for one in helm.objects(*arguments) if one["apiVersion"].startswith("monitoring.")}

    assert found == kinds


def installed(helm: Helm, *arguments: str) -> dict[str, Any]:
    (rule,) = [one for one in helm.objects(*ON, *arguments) if one["kind"] == "PrometheusRule"]
    return rule


def fired(rule: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]


def test_the_installed_rules_are_those_of_the_file(helm: Helm) -> None:
    assert fired(installed(helm)) == alerts()


def test_alerts_link_to_where_the_runbooks_are_published(helm: Helm) -> None:
    rule = installed(helm, "--set=monitoring.rules.runbooks=https://wiki.example.com/sluice/")

    links = {one["annotations"]["runbook_url"] for one in fired(rule)}
    assert links == {f"https://wiki.example.com/sluice/{one['alert']}.md" for one in alerts()}


def test_nobody_is_sent_to_an_address_that_nobody_named(helm: Helm) -> None:
    """What an alert says without it is the page's path in this repository."""
    said = [one["annotations"] for one in fired(installed(helm))]

    assert not [one for one in said if "runbook_url" in one]
    assert all((CHART.parents[1] / one["runbook"]).is_file() for one in said)


def test_an_alert_is_changed_or_left_out_by_its_name(helm: Helm) -> None:
    changes = "--set=monitoring.rules.overrides"
    rule = installed(
        helm,
        f"{changes}.SluiceRolloutStuck.for=2h",
        f"{changes}.SluiceKVKnee.severity=critical",
        f"{changes}.SluiceShedding.disabled=true",
    )

    by_name = {one["alert"]: one for one in fired(rule)}
    assert by_name["SluiceRolloutStuck"]["for"] == "2h"
    assert by_name["SluiceKVKnee"]["labels"]["severity"] == "critical"
    assert {one["alert"] for one in alerts()} - by_name.keys() == {"SluiceShedding"}


def test_a_change_of_an_alert_that_does_not_exist_is_refused(helm: Helm) -> None:
    said = helm.refusal(*ON, "--set=monitoring.rules.overrides.SluiceTypo.for=2h")

    assert "monitoring.rules.overrides.SluiceTypo: there is no such alert" in said


@pytest.mark.parametrize("kind", ["PrometheusRule", "ServiceMonitor"])
def test_rules_and_monitors_carry_the_labels_by_which_prometheus_selects(helm: Helm, kind: str) -> None:
    objects = helm.objects(*ON, "--set=monitoring.labels.release=kube-prometheus-stack")

    (one,) = [found for found in objects if found["kind"] == kind]
    assert one["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_the_notes_say_whether_there_are_alerts(helm: Helm) -> None:
    words = ["install", "sluice", str(CHART), "--namespace", "sluice-system", "--dry-run=client"]

    without, with_rules = helm.run(*words).stdout, helm.run(*words, *ON).stdout

    assert "NO ALERTS WERE INSTALLED" in without
    assert "files/rules/sluice.yaml" in without
    assert "Alerts and recording rules are in PrometheusRule sluice-system/sluice-operator" in with_rules
