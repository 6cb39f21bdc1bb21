"""The rights of the operator are the least: what the audit log of this whole run tells, against what the chart grants.

It runs last. In a run of a part of the tests, it proves that nothing was forbidden and nothing else was used; in a run
of a whole tier, also that the tier used what its record says. That record and chart agree, tests/charts proves.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from cluster.rights import rights
from cluster.service.release import CHART
from cluster.testnode import audit
from cluster.testnode.cluster import Cluster

pytestmark = pytest.mark.cluster

CLUSTER = Path(__file__).parents[1]


@pytest.mark.parametrize("tier", ["core", pytest.param("full", marks=pytest.mark.full)])
def test_the_operators_were_forbidden_nothing_and_used_every_right_that_they_have(
    node: Cluster, tier: str, request: pytest.FixtureRequest
) -> None:
    asked = [one for one in audit.requests(node.run) if one.account in node.operators]
    if not node.operators:
        pytest.skip("no operator ran")
    assert {one.account for one in asked} == node.operators, "an operator that asked for nothing is not the one meant"
    asked = [one for one in asked if not any(since <= one.at <= until for since, until in node.earlier_releases)]
    assert [one for one in asked if not one.is_allowed and not is_on_purpose(node, one)] == []

    rendered = node.helm("template", "sluice", str(CHART), "--namespace", "anywhere")
    granted = rights.granted([one for one in yaml.safe_load_all(rendered) if one], "sluice-operator")
    used = rights.used(asked)
    assert used <= granted

    if not is_whole(request.config):
        return
    if os.environ.get("SLUICE_GOLDEN") == "write":
        record = {**rights.recorded(), tier: sorted(used)}
        rights.RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    assert set(rights.recorded()[tier]) - used == set(), "no longer used, or its test did not run"


def is_on_purpose(node: Cluster, refused: audit.Request) -> bool:
    """Whether a test had taken the rights away, or the API server."""
    whose = {"", refused.account}
    return any(who in whose and since <= refused.at <= until for who, since, until in node.without_rights)


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests of a tier run here: no file and no word was chosen."""
    chosen = [Path(word).resolve() for word in config.args]
    return chosen == [CLUSTER] and not config.option.keyword and not config.option.lf
