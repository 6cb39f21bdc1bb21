"""What pods say about their troubles."""

from __future__ import annotations

from typing import Any

import pytest

import operator_scene as scene
from sluice_operator import pods

Json = dict[str, Any]


def waiting(reason: str, message: str = "") -> Json:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, *, reason: str = "Error", message: str = "", back_off: bool = True) -> Json:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    if back_off:
        return {**waiting("CrashLoopBackOff", "back-off 10s restarting"), "lastState": last}
    return {"state": {"running": {}}, "lastState": last}


NOT_SCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        pytest.param(
            scene.pod(ready=False, phase="Pending", conditions=[NOT_SCHEDULED]),
            "Unschedulable",
            "3 Insufficient nvidia.com/gpu",
            id="no node fits, in the scheduler's words",
        ),
        pytest.param(
            scene.pod(ready=False, engine=waiting("ImagePullBackOff", 'Back-off pulling image "x"')),
            "ImagePullFailed",
            "engine: Back-off pulling",
            id="the image cannot be pulled",
        ),
        pytest.param(
            scene.pod(ready=False, gate=waiting("ErrImageNeverPull")),
            "ImagePullFailed",
            "gate: ErrImageNeverPull",
            id="the gate's image is not there",
        ),
        pytest.param(
            scene.pod(ready=False, engine=waiting("CreateContainerConfigError", 'secret "k" not found')),
            "ContainerConfigError",
            'secret "k" not found',
            id="a Secret is missing",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(137, reason="OOMKilled")),
            "OutOfMemory",
            "engine used more memory",
            id="killed for memory",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(1, message="ModelMissing: /models/llama does not exist\n")),
            "ModelMissing",
            "/models/llama does not exist",
            id="the engine's last words name the cause",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(1, message="OutOfMemory: the cache needs 9 GB, 8 GB are free")),
            "OutOfMemory",
            "9 GB",
            id="the device's memory is too small",
        ),
        pytest.param(
            scene.pod(ready=False, gate=ended(2, message='{"message": "x"}\nPortInUse: port 8080 is in use\n')),
            "PortInUse",
            "gate: port 8080 is in use",
            id="the last of the gate's words names the cause",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(1, message="Traceback\nKeyError: 'x'")),
            "CrashLoop",
            "exit code 1: KeyError: 'x'",
            id="the last line of a crash",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(2, message="scheduling.max_sequences: must be at least 1")),
            "InvalidConfig",
            "max_sequences",
            id="the engine refuses its file",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(137, back_off=False)),
            "EngineKilled",
            "exit code 137",
            id="a killed engine that loads again",
        ),
    ],
)
def test_a_failure_is_told_in_plain_words(pod: Json, reason: str, words: str) -> None:
    (view,) = pods.views(scene.observed(pod))

    assert view.failure is not None
    assert view.failure.reason == reason
    assert words in view.failure.message
    assert view.failure.pod == "chat-new-1"


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(scene.pod(), id="a pod that serves"),
        pytest.param(scene.pod(engine=ended(137, back_off=False)), id="a pod that serves again after a crash"),
        pytest.param(scene.pod(ready=False), id="a pod that starts"),
        pytest.param(scene.pod(ready=False, engine=waiting("ContainerCreating")), id="containers being made"),
        pytest.param(scene.pod(ready=False, engine=ended(0, reason="Completed", back_off=False)), id="a clean end"),
    ],
)
def test_no_failure_is_made_up(pod: Json) -> None:
    (view,) = pods.views(scene.observed(pod))

    assert view.failure is None


@pytest.mark.parametrize(("reason", "told"), [("Evicted", "Evicted"), ("NodeShutdown", "PodFailed")])
def test_a_pod_that_ended_as_a_whole_is_only_a_failure(reason: str, told: str) -> None:
    seen = scene.observed(scene.pod(ready=False, phase="Failed", reason=reason, message="The node was low on memory."))

    (failed,) = pods.ended(seen)

    assert pods.views(seen) == ()
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.message) == (told, "The node was low on memory.")


def test_every_known_failure_has_a_hint() -> None:
    assert all(text.endswith(".") for text in pods.HINTS.values())


def test_pods_on_their_way_out_are_not_counted() -> None:
    seen = scene.observed(scene.pod("a", deleting=True), scene.pod("b"), scene.pod("c", phase="Succeeded", ready=False))

    assert [view.name for view in pods.views(seen)] == ["b"]


def test_the_newest_revision_is_the_current_one() -> None:
    seen = scene.observed(scene.pod("a", revision="old"), scene.pod("b", revision="new"))

    assert [view.is_current for view in pods.views(seen)] == [False, True]


def test_a_refusal_of_the_pods_themselves_is_found_at_the_replica_set() -> None:
    refusing = scene.replica_set("new", 2)
    text = 'pods "chat-new-" is forbidden: exceeded quota: gpus'
    refusing["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": text}]}

    found = pods.refusal(scene.observed(replica_sets=(refusing,)), None)

    assert found is not None
    assert (found.reason, found.message) == ("PodsRefused", text)
