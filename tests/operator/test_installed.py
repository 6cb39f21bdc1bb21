"""What `helm test` says of an installation."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator import installed
from sluice_operator.installed import Unanswered, findings

OPERATOR = "/apis/apps/v1/namespaces/sluice-system/deployments/sluice-operator"
SERVED = {"/apis/sluice.dev/v1alpha1": {"resources": [{"kind": "InferenceService"}]}}


def deployment(wanted: int, ready: int | None) -> dict[str, Any]:
    return {OPERATOR: {"spec": {"replicas": wanted}, "status": {} if ready is None else {"readyReplicas": ready}}}


@pytest.mark.parametrize(
    ("answers", "good", "said"),
    [
        pytest.param({**SERVED, **deployment(1, 1)}, [True, True], "1 of 1 replicas ready", id="all is well"),
        pytest.param({**SERVED, **deployment(2, 1)}, [True, False], "1 of 2 replicas ready", id="a replica is missing"),
        pytest.param({**SERVED, **deployment(1, None)}, [True, False], "0 of 1", id="no replica is ready yet"),
        pytest.param({**SERVED, **deployment(0, None)}, [True, False], "0 of 0", id="it is scaled to nothing"),
        pytest.param(deployment(1, 1), [False, True], "is not served: 404", id="the definition is missing"),
        pytest.param(SERVED, [True, False], "sluice-system/sluice-operator: 404", id="the operator is missing"),
        pytest.param(
            {"/apis/sluice.dev/v1alpha1": {"resources": []}, **deployment(1, 1)},
            [False, True],
            "inferenceservices.sluice.dev is not served",
            id="another kind of the group is served",
        ),
    ],
)
def test_each_part_is_looked_at_and_told(answers: dict[str, Any], good: list[bool], said: str) -> None:
    def read(path: str) -> dict[str, Any]:
        if path not in answers:
            raise Unanswered("404")
        found: dict[str, Any] = answers[path]
        return found

    found = findings(read, "sluice-system", "sluice-operator")

    assert [is_good for is_good, _ in found] == good
    assert any(said in line for _, line in found)


def test_outside_a_cluster_it_says_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("sys.argv", ["installed", "sluice-system", "sluice-operator"])

    assert installed.main() == 2
    assert capsys.readouterr().err == "this check runs in a pod: `helm test` starts it\n"


def test_without_arguments_it_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["installed"])

    assert installed.main() == 2
    assert "NAMESPACE DEPLOYMENT" in capsys.readouterr().err
