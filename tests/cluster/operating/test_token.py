"""The operator's own credentials: tokens that are replaced, and one that ends before its successor is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.operating.account import Account
from cluster.operating.conftest import Start, idle_service
from cluster.service.space import KIND
from cluster.testnode.cluster import Cluster
from cluster.testnode.operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_a_token_that_ends_is_replaced_by_the_one_in_its_file_and_the_process_goes_on(
    alone: Cluster, namespace: str, start: Start, tmp_path: Path
) -> None:
    account = Account(alone, namespace, tmp_path / "credentials")

    def serves(name: str) -> None:
        """Whether a change is seen, carried out and told: by both clients of the operator, with its rights."""
        alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service(name))
        where = (f"{KIND}/{name}", "--for=condition=Degraded=False", "--timeout=60s")
        alone.kubectl("-n", namespace, "wait", *where, timeout_s=90)

    first = account.give("first")
    operator = start("rotating", account.environment, account.folder)
    serves("before")

    second = account.give("second")
    account.revoke("first", first)
    serves("rotated")

    before = sign_ins(operator)
    account.revoke("second", second)  # and nothing in its place
    alone.wait_for("it to be refused", lambda: "Unauthorized" in operator.log.read_text())
    # Whether by its Lease or by itself: it asks again, and not as fast as it can.
    alone.wait_for("it to stand by", lambda: "standing by" in operator.get("/readyz")[1])
    assert sign_ins(operator) - before < 5
    account.give("third")
    serves("healed")
    assert operator.process.poll() is None


def sign_ins(operator: OperatorProcess) -> int:
    return operator.log.read_text().count("authentication has been initiated")
