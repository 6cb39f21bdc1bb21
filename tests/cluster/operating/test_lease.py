"""Two real operators, one real Lease: one acts, and the other follows in time."""

from __future__ import annotations

import json
import time

import pytest

from cluster.operating.conftest import Start, idle_service
from cluster.testnode.cluster import Cluster
from cluster.testnode.operator_process import OperatorProcess

pytestmark = pytest.mark.cluster


def leads(operator: OperatorProcess) -> bool:
    return operator.metric("sluice_operator_leader") == 1


def has_deployment(node: Cluster, namespace: str, name: str) -> bool:
    return any(one["metadata"]["name"] == name for one in node.list("deployments", namespace))


def test_one_acts_the_other_follows_within_twenty_seconds_of_its_death(
    alone: Cluster, namespace: str, start: Start
) -> None:
    first = start("first")
    alone.wait_for("the first to lead", lambda: leads(first) and first.get("/readyz")[0] == 200)
    second = start("second")
    alone.wait_for("the second to stand by", lambda: second.get("/readyz")[0] == 200)
    assert "standing by" in second.get("/readyz")[1]
    alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service("early"))
    alone.wait_for("its Deployment", lambda: has_deployment(alone, namespace, "early"))
    assert (leads(first), leads(second)) == (True, False)
    assert second.metric("sluice_operator_api_writes_total") == 0

    died_at = time.monotonic()
    first.kill()
    alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service("late"))

    alone.wait_for("the Deployment of the late one", lambda: has_deployment(alone, namespace, "late"), timeout_s=60)
    took_s = time.monotonic() - died_at
    assert leads(second)
    assert took_s < 20, f"followed after {took_s:.1f} s"
    print(f"followed after {took_s:.1f} s")

    # One that ends well is followed at once, and by one that came later.
    third = start("third")
    alone.wait_for("the third to stand by", lambda: third.get("/readyz")[0] == 200)
    since = time.monotonic()
    assert second.end() == 0
    alone.wait_for("the third to lead", lambda: leads(third))
    assert time.monotonic() - since < 8


def test_who_loses_the_lease_stands_by(alone: Cluster, namespace: str, start: Start) -> None:
    operator = start("loser")
    alone.wait_for("it to lead", lambda: leads(operator))

    taken = {"spec": {"holderIdentity": "somebody-else"}}
    alone.kubectl("-n", namespace, "patch", "lease", "sluice-operator", "--type=merge", "-p", json.dumps(taken))

    alone.wait_for("it to stand by", lambda: "standing by" in operator.get("/readyz")[1])
    assert not leads(operator)
    assert "is held by somebody-else now" in operator.log.read_text()
    holder = alone.get("lease", "sluice-operator", namespace)["spec"]["holderIdentity"]
    assert holder == "somebody-else", "what is another's is not released"
    # The very same process takes it again once the other is seen to be gone.
    alone.wait_for("it to lead again", lambda: leads(operator))
    assert operator.end() == 0
