"""The operator's own credentials: tokens that are replaced, and one that ends before its successor is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.operating.account import Account
from cluster.operating.conftest import Start, serves
from cluster.testnode.cluster import Cluster
from cluster.testnode.operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_a_token_that_ends_is_replaced_by_the_one_in_its_file_and_the_process_goes_on(
    alone: Cluster, namespace: str, start: Start, tmp_path: Path
) -> None:
    account = Account(alone, namespace, tmp_path / "credentials")
    first = account.give("first")
    operator = start("rotating", account.environment, account.folder)
    serves(alone, namespace, "before")

    second = account.give("second")
    account.revoke("first", first)
    serves(alone, namespace, "rotated")

    before = sign_ins(operator)
    account.revoke("second", second)  # and nothing in its place
    alone.wait_for("it to be refused", lambda: "Unauthorized" in operator.log.read_text())
    # Whether by its Lease or by itself: it asks again, and not as fast as it can.
    alone.wait_for("it to stand by", lambda: "standing by" in operator.get("/readyz")[1])
    assert sign_ins(operator) - before < 5
    account.give("third")
    serves(alone, namespace, "healed")
    assert operator.process.poll() is None


def sign_ins(operator: OperatorProcess) -> int:
    return operator.log.read_text().count("authentication has been initiated")
