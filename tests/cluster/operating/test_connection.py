"""An API server that is there and does not serve: one that throttles, one whose open connections fall silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.operating.account import NAME, Account
from cluster.operating.conftest import Start, idle_service
from cluster.service.space import KIND
from cluster.testnode import audit
from cluster.testnode.boot import NODE_IP
from cluster.testnode.cluster import Cluster
from cluster.testnode.relay import Relay

pytestmark = [pytest.mark.cluster, pytest.mark.full]

FLOW = "flowcontrol.apiserver.k8s.io/v1"
BUSY = 429


def serves(node: Cluster, namespace: str, name: str, within_s: int = 60) -> None:
    """Whether a new service is seen, carried out and told."""
    node.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service(name))
    where = (f"{KIND}/{name}", "--for=condition=Degraded=False", f"--timeout={within_s}s")
    node.kubectl("-n", namespace, "wait", *where, timeout_s=within_s + 30)


@pytest.fixture
def account(alone: Cluster, namespace: str, tmp_path: Path) -> Account:
    """What the operator signs in with."""
    made = Account(alone, namespace, tmp_path / "credentials")
    made.give("token")
    return made


@pytest.fixture
def throttle(alone: Cluster, namespace: str) -> Iterator[list[dict[str, object]]]:
    """What, once applied, has the API server refuse every request of that account with 429 and Retry-After."""
    limited = {"nominalConcurrencyShares": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
    who = {"kind": "ServiceAccount", "serviceAccount": {"name": NAME, "namespace": namespace}}
    paths = {"verbs": ["*"], "nonResourceURLs": ["*"]}
    rule = {"subjects": [who], "resourceRules": [everything], "nonResourceRules": [paths]}
    named = {"apiVersion": FLOW, "metadata": {"name": "nothing"}}
    flow = {"priorityLevelConfiguration": {"name": "nothing"}, "matchingPrecedence": 2, "rules": [rule]}
    yield [
        {**named, "kind": "PriorityLevelConfiguration", "spec": {"type": "Limited", "limited": limited}},
        {**named, "kind": "FlowSchema", "spec": flow},
    ]
    alone.kubectl("delete", "flowschema,prioritylevelconfiguration", "nothing", "--ignore-not-found")


def test_an_operator_that_is_throttled_asks_seldom_and_goes_on_afterwards(
    alone: Cluster, namespace: str, start: Start, account: Account, throttle: list[dict[str, object]]
) -> None:
    operator = start("throttled", account.environment, account.folder)
    serves(alone, namespace, "before")

    def refused() -> list[audit.Request]:
        mine = f"{namespace}:{NAME}"
        return [one for one in audit.requests(alone.run) if one.account == mine and one.code == BUSY]

    alone.apply(*throttle)
    alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service("meanwhile"))
    # It may act no more: what it cannot renew it does not hold.
    alone.wait_for("it to stand by", lambda: "standing by" in operator.get("/readyz")[1])
    alone.wait_for("it to have been refused for a while", lambda: lasted_s(refused()) > 15)
    assert len(refused()) / lasted_s(refused()) < 5, "requests a second"

    alone.kubectl("delete", "flowschema,prioritylevelconfiguration", "nothing")
    serves(alone, namespace, "meanwhile")
    serves(alone, namespace, "after")
    assert operator.process.poll() is None


def lasted_s(requests: list[audit.Request]) -> float:
    return (requests[-1].at - requests[0].at).total_seconds() if requests else 0.0


def test_connections_that_fall_silent_are_noticed_and_begun_anew(
    alone: Cluster, namespace: str, start: Start, account: Account
) -> None:
    with Relay(NODE_IP, 6443).running() as relay:
        # The API server's certificate is for this name, too. Without a Lease nothing but the watches can notice.
        through = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": str(relay.port)}
        operator = start("deaf", {**through, "SLUICE_LEASE": ""}, account.folder)
        serves(alone, namespace, "before")

        relay.fall_silent()
        alone.kubectl("-n", namespace, "delete", "deployment", "before")
        serves(alone, namespace, "unheard", within_s=150)
        alone.wait_for(
            "what went unseen to come back",
            lambda: len(alone.list("deployments", namespace)) == 2,
            timeout_s=150,
        )
        assert operator.metric("sluice_operator_watch_restarts_total") > 0
        assert operator.process.poll() is None
