"""The chart on a real API server: what it renders is accepted, what it installs can be tested, upgraded and watched."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cluster.service.release import CHART, IMAGES, Release
from cluster.service.space import KIND, Space
from cluster.testnode import definitions
from cluster.testnode.cluster import Object, Refused
from cluster.testnode.progress import Progress

pytestmark = pytest.mark.cluster

DEFINITION = "files/crds/inferenceservices.sluice.dev.yaml"


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="by default"),
        pytest.param(["--set=watchNamespaces={NAMESPACE}", "--set=rbac.aggregate=false"], id="for one namespace"),
        pytest.param(["--set=replicas=2"], id="for two replicas"),
        pytest.param(["--set=monitoring.dashboards.install=true", "--set=logLevel=Debug"], id="with dashboards"),
    ],
)
def test_the_api_server_accepts_what_helm_renders(release: Release, namespace: str, values: list[str]) -> None:
    node = release.node
    words = [value.replace("NAMESPACE", namespace) for value in values]
    rendered = node.helm("template", "rendered", str(CHART), "--namespace", namespace, *IMAGES, *words)

    said = node.kubectl("apply", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", "-", stdin=rendered)

    assert "deployment.apps/rendered-operator created (server dry run)" in said
    assert node.list("deployments", namespace) == []


def test_helm_test_says_that_the_release_works_and_leaves_nothing(release: Release) -> None:
    before = release.objects()

    said = release.node.helm("test", release.name, "--namespace", release.namespace)

    assert "Succeeded" in said
    assert release.objects() == before


def test_helm_test_fails_while_the_operator_is_not_there(release: Release) -> None:
    node, deployment = release.node, f"deployment/{release.name}-operator"
    where = ("-n", release.namespace)
    node.kubectl(*where, "scale", deployment, "--replicas=0")
    # Until it has ended it answers.
    node.kubectl(*where, "wait", "--for=delete", "pod", "--selector", release.operator_pods, "--timeout=60s")
    try:
        with pytest.raises(Refused):
            node.helm("test", release.name, "--namespace", release.namespace)
        assert "FAILED  operator" in node.kubectl(*where, "logs", f"{release.name}-operator-test")
    finally:
        node.kubectl(*where, "delete", "pod", f"{release.name}-operator-test", "--ignore-not-found")
        release.install()


def test_an_upgrade_brings_the_definition_of_the_new_chart_and_keeps_every_resource(
    release: Release, space: Space, tmp_path: Path
) -> None:
    earlier = shutil.copytree(CHART, tmp_path / "sluice")
    text = (earlier / DEFINITION).read_text()
    (earlier / DEFINITION).write_text(text.replace("categories: [sluice]", "categories: [sluice, old]"))

    def categories() -> list[str]:
        found: list[str] = space.node.get("customresourcedefinition", KIND)["spec"]["names"].get("categories", [])
        return found

    now = categories()
    space.apply(space.tiny("stays", replicas=0))
    uid = space.get(KIND, "stays")["metadata"]["uid"]
    try:
        release.install_from(earlier)
        assert categories() == [*now, "old"]
    finally:
        release.install()

    assert categories() == now == ["sluice"]
    assert space.get(KIND, "stays")["metadata"]["uid"] == uid


@pytest.mark.full
def test_of_two_operators_the_other_goes_on_when_the_one_that_acts_is_gone(release: Release, space: Space) -> None:
    node, name, where = release.node, f"{release.name}-operator", release.namespace

    def holder() -> str:
        found: str = node.get("lease", name, where)["spec"]["holderIdentity"]
        return found

    def pods() -> Sequence[Object]:
        found = node.list("pods", where, release.operator_pods)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def may_go() -> int:
        found: int = node.get("poddisruptionbudget", name, where)["status"]["disruptionsAllowed"]
        return found

    try:
        release.install("--set=replicas=2")
        node.wait_for("one of the two to be allowed to go", lambda: may_go() == 1)
        # The one before gave its Lease back; for a moment nobody has it.
        node.wait_for("one of the two to act", lambda: holder() in {pod["metadata"]["name"] for pod in pods()})
        acting = holder()
        node.kubectl("-n", where, "delete", "pod", acting, "--grace-period=0", "--force")
        # The kubelet ends the process a moment after its pod is gone; until then it may act once more.
        node.wait_for("the other to act", lambda: holder() not in {"", acting})
        space.apply(space.tiny("late", replicas=0))
        space.wait("late", "condition=Degraded=False")
        assert holder() != acting
    finally:
        release.install()


@pytest.fixture
def monitored(release: Release) -> Iterator[None]:
    """The node while it serves the kinds of Prometheus Operator."""
    folder = definitions.ensure(Progress(sys.stderr), definitions.PROMETHEUS_OPERATOR)
    node = release.node
    files = [word for file in sorted(folder.glob("*.yaml")) for word in ("-f", str(file))]
    node.kubectl("apply", "--server-side", *files)
    names = [
        f"customresourcedefinition/{kind}.monitoring.coreos.com" for kind in ("prometheusrules", "servicemonitors")
    ]
    node.kubectl("wait", "--for=condition=Established", *names)
    try:
        yield
    finally:
        # Helm cannot upgrade a release that has objects of a kind that is gone.
        release.install("--set=monitoring.rules.install=Disabled", "--set=monitoring.serviceMonitor=Disabled")
        node.kubectl("delete", *files)
        release.install()


@pytest.mark.usefixtures("monitored")
def test_where_prometheus_operator_is_the_release_brings_rules_that_its_schema_accepts(release: Release) -> None:
    said = release.install("--set=monitoring.labels.release=prometheus")

    assert "Alerts and recording rules are in PrometheusRule" in said
    rule = release.node.get("prometheusrules", f"{release.name}-operator", release.namespace)
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert len(rule["spec"]["groups"]) > 1
    assert release.node.get("servicemonitors", f"{release.name}-operator", release.namespace)


def test_where_it_is_not_the_notes_say_that_there_are_no_alerts(release: Release) -> None:
    assert "NO ALERTS WERE INSTALLED" in release.install()
