"""A silence: connections to the API server that stay open, and through which nothing comes any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.operating.account import Account
from cluster.operating.conftest import Start, serves
from cluster.testnode.boot import NODE_IP
from cluster.testnode.cluster import Cluster
from cluster.testnode.relay import Relay

pytestmark = [pytest.mark.cluster, pytest.mark.full]


@pytest.fixture
def account(alone: Cluster, namespace: str, tmp_path: Path) -> Account:
    """What the operator signs in with."""
    made = Account(alone, namespace, tmp_path / "credentials")
    made.give("token")
    return made


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
