"""What counts as a true status in the chaos tests: no node is needed to say so."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.service.truth import Sight, Truth, judge


def condition(kind: str, *, holds: bool) -> dict[str, str]:
    return {"type": kind, "status": "True" if holds else "False"}


def pod(*, serves: bool, leaves: bool = False) -> dict[str, Any]:
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaves else {}
    return {"metadata": metadata, "status": {"conditions": [condition("Ready", holds=serves)]}}


def service(*, ready: bool = True, serving: int = 2, generation: int = 1) -> dict[str, Any]:
    conditions = [condition("Ready", holds=ready), condition("Available", holds=serving > 0)]
    status = {"observedGeneration": generation, "replicas": 2, "readyReplicas": serving, "conditions": conditions}
    return {"metadata": {"generation": 1}, "spec": {"replicas": 2}, "status": status}


BOTH = [pod(serves=True), pod(serves=True)]


@pytest.mark.parametrize(
    ("told", "pods", "lie"),
    [
        pytest.param(service(), BOTH, None, id="both serve and it says so"),
        pytest.param(service(), [*BOTH, pod(serves=True, leaves=True)], None, id="who leaves is not counted"),
        pytest.param(service(generation=0), BOTH, "observedGeneration is 0, and it should be 1", id="a change unseen"),
        pytest.param(service(ready=False), BOTH, "Ready is False, and it should be True", id="a failure that is over"),
        pytest.param(
            service(),
            [pod(serves=True), pod(serves=False)],
            "readyReplicas is 2, and it should be 1; Ready is True, and it should be False",
            id="a pod that is gone unseen",
        ),
    ],
)
def test_a_status_is_true_when(told: dict[str, Any], pods: list[dict[str, Any]], lie: str | None) -> None:
    seen = judge(told, pods, 7.0)

    assert seen.lie == lie
    assert seen.is_settled == (lie is None)


def test_a_lie_lasts_from_its_first_sight_to_its_last() -> None:
    truth = Truth(None, "chat", [Sight(at, lie) for at, lie in enumerate([None, "a", "b", None, "c", None])])  # type: ignore[arg-type]  # it looks at nothing here

    assert truth.longest_lie(0.0) == (1, "b")
    assert truth.untrue_until(0.0) == 5
    assert truth.longest_lie(4.0) == (0, "c")
    assert truth.untrue_until(5.0) == 5.0
