"""What is not wanted any more goes, of every kind: by an operator that has the chart's rights and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cluster.operating.account import Account
from cluster.operating.conftest import Start, idle_service
from cluster.service.space import KIND
from cluster.testnode import definitions
from cluster.testnode.cluster import Cluster
from cluster.testnode.progress import Progress

pytestmark = pytest.mark.cluster

PROMETHEUS = {"SLUICE_PROMETHEUS_URL": "http://prometheus.monitoring:9090"}
KEPT_RENDERINGS = 3


@pytest.fixture
def neighbours(alone: Cluster) -> Iterator[Sequence[str]]:
    """The node while it serves the kinds of Prometheus Operator and KEDA, by their plurals."""
    made = [definitions.ensure(Progress(sys.stderr), one) for one in definitions.ALL]
    wanted = ("podmonitors", "scaledobjects")
    files = [file for folder in made for file in folder.glob("*.yaml") if file.stem.endswith(wanted)]
    words = [word for file in files for word in ("-f", str(file))]
    alone.kubectl("apply", "--server-side", *words)
    names = ("podmonitors.monitoring.coreos.com", "scaledobjects.keda.sh")
    alone.kubectl("wait", "--for=condition=Established", *(f"customresourcedefinition/{name}" for name in names))
    try:
        yield names
    finally:
        alone.kubectl("delete", *words)


def test_what_is_not_wanted_any_more_goes(
    alone: Cluster, neighbours: Sequence[str], namespace: str, start: Start, tmp_path: Path
) -> None:
    def change(**spec: object) -> None:
        alone.kubectl("-n", namespace, "patch", KIND, "chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        seen = alone.get(KIND, "chat", namespace)["metadata"]["generation"]
        where = ("-n", namespace, "wait", f"{KIND}/chat", "--timeout=60s")
        alone.kubectl(*where, f"--for=jsonpath={{.status.observedGeneration}}={seen}", timeout_s=90)

    def names(kind: str) -> list[str]:
        return [one["metadata"]["name"] for one in alone.list(kind, namespace, "sluice.dev/inferenceservice=chat")]

    account = Account(alone, namespace, tmp_path / "credentials")
    account.give("token")
    first = start("first", {**PROMETHEUS, **account.environment}, account.folder)
    alone.kubectl(
        "-n", namespace, "apply", "-f", "-",
        stdin=idle_service("chat", autoscaling={"minReplicas": 1, "maxReplicas": 2}),
    )  # fmt: skip
    around = [*neighbours, "networkpolicies", "serviceaccounts"]
    alone.wait_for("all that is around the pods", lambda: [names(kind) for kind in around] == [["chat"]] * 4)

    change(autoscaling=None, monitoring={"podMonitor": "Disabled"})
    alone.wait_for("monitor and scaler to go", lambda: not any(names(kind) for kind in neighbours))

    change(podTemplate={"serviceAccountName": "default"})
    assert names("serviceaccounts") == ["chat"], "the older ReplicaSets could come back"
    oldest = names("controllerrevisions")
    for tokens in (8, 32, 64, 128):  # each a template of its own
        change(cache={"blockTokens": tokens})
    alone.wait_for("the account to go", lambda: names("serviceaccounts") == [])
    alone.wait_for("the old renderings to go", lambda: len(names("controllerrevisions")) == KEPT_RENDERINGS)
    assert not set(oldest) & set(names("controllerrevisions"))
    assert len([name for name in names("configmaps") if name != "chat-live"]) <= KEPT_RENDERINGS + 1

    assert first.end() == 0
    start("second", {"SLUICE_NETWORK_POLICY": "Disabled", **account.environment}, account.folder)
    alone.wait_for("the policy to go", lambda: names("networkpolicies") == [])
