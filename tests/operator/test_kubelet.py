"""What the kubelet's events add to a pod that says too little of itself."""

from __future__ import annotations

from typing import Any

import pytest

import operator_scene as scene
from sluice_operator.observed import pods

Json = dict[str, Any]

NO_SECRET = 'MountVolume.SetUp failed for volume "keys" : secret "nokey" not found'
PROBE_KILL = "Container engine failed startup probe, will be restarted"
RUN = {"startedAt": "2026-01-01T00:01:00Z", "finishedAt": "2026-01-01T00:02:00Z"}


def event(reason: str, message: str = "", at: str = "2026-01-01T00:01:30Z", version: int = 1) -> Json:
    return {
        "metadata": {"resourceVersion": str(version)}, "reason": reason, "message": message, "lastTimestamp": at,
    }  # fmt: skip


def creating(**more: Any) -> Json:
    """A pod whose engine is not made yet."""
    return scene.pod(ready=False, engine={"state": {"waiting": {"reason": "ContainerCreating"}}}, **more)


def pulling_with_a_secret() -> Json:
    pod = scene.pod(ready=False, engine={"state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}})
    return {**pod, "spec": {"imagePullSecrets": [{"name": "mine"}]}}


def ended(code: int) -> Json:
    """A pod whose engine runs again after an end."""
    return scene.pod(ready=False, engine={"lastState": {"terminated": {"exitCode": code, "reason": "Error", **RUN}}})


@pytest.mark.parametrize(
    ("pod", "events", "reason", "words"),
    [
        pytest.param(creating(), [event("FailedMount", NO_SECRET)], "SecretMissing", "nokey", id="a Secret's volume"),
        pytest.param(
            creating(),
            [event("FailedMount", 'MountVolume.SetUp failed for volume "v" : configmap "c" not found')],
            "ConfigMapMissing",
            'configmap "c"',
            id="a ConfigMap's volume",
        ),
        pytest.param(
            creating(),
            [event("FailedMount", 'references non-existent secret key: "a"')],
            "SecretMissing",
            "non-existent",
            id="a key that the Secret lacks",
        ),
        pytest.param(
            creating(), [event("FailedAttachVolume", "Multi-Attach error")], "VolumeFailed", "Multi-Attach", id="attach"
        ),
        pytest.param(
            creating(),
            [
                event("FailedMount", "mount failed: exit status 32", version=1),
                event("FailedMount", "Unable to attach or mount volumes: timed out waiting for it", version=2),
            ],
            "VolumeFailed",
            "exit status 32",
            id="the event that names a cause comes before the later one that names none",
        ),
        pytest.param(
            creating(),
            [event("FailedMount", "Unable to attach or mount volumes: timed out waiting for it")],
            "VolumeFailed",
            "timed out",
            id="no event names a cause",
        ),
        pytest.param(
            creating(), [event("FailedCreatePodSandBox", "cni: no IP left")], "SandboxFailed", "no IP", id="a sandbox"
        ),
        pytest.param(
            ended(137),
            [event("Killing", PROBE_KILL), event("Unhealthy", "Startup probe failed: HTTP probe failed: 503")],
            "ProbeFailed",
            "its startup probe failed, and it was restarted (HTTP probe failed: 503)",
            id="killed for a probe",
        ),
        pytest.param(ended(0), [event("Killing", PROBE_KILL)], "ProbeFailed", "startup", id="a good end after a probe"),
        pytest.param(ended(137), [], "EngineKilled", "137", id="killed by somebody"),
        pytest.param(
            ended(137),
            [event("Killing", PROBE_KILL, at="2025-12-31T23:59:00Z")],
            "EngineKilled",
            "137",
            id="a probe that failed in an earlier run",
        ),
        pytest.param(
            ended(137),
            [event("Killing", PROBE_KILL.replace("engine", "gate"))],
            "EngineKilled",
            "137",
            id="another container's probe",
        ),
        pytest.param(
            pulling_with_a_secret(),
            [event("FailedToRetrieveImagePullSecret", "Unable to retrieve some image pull secrets (mine)")],
            "ImagePullFailed",
            "(mine)",
            id="a pull Secret that does not exist",
        ),
    ],
)
def test_events_explain_what_the_pod_does_not(pod: Json, events: list[Json], reason: str, words: str) -> None:
    (silent,) = pods.views(scene.observed(pod))
    (view,) = pods.views(scene.observed(pod), {"chat-new-1": events})

    assert silent.is_silent
    assert view.failure is not None
    assert view.failure.reason == reason
    assert words in view.failure.message
    assert view.failure.hint
    assert view.failure.pod == "chat-new-1"


def test_an_engine_whose_gate_did_not_answer_is_the_gates_failure() -> None:
    killed = {"lastState": {"terminated": {"exitCode": 137, "reason": "Error", **RUN}}}
    pod = scene.pod(ready=False, engine=killed, gate=killed)
    events = [
        event("Killing", "Init container gate failed liveness probe", version=1),
        event("Killing", "Container engine failed liveness probe, will be restarted", version=2),
    ]

    (view,) = pods.views(scene.observed(pod), {"chat-new-1": events})

    assert view.failure is not None
    assert view.failure.message == "gate: its liveness probe failed, and it was restarted"


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([], id="nothing was told yet"),
        pytest.param(
            [event("FailedMount", NO_SECRET, version=1), event("Pulling", version=2)], id="it is past the mounts by now"
        ),
        pytest.param([event("Scheduled", "Successfully assigned")], id="nothing went wrong"),
    ],
)
def test_no_failure_is_made_of_events_that_are_over(events: list[Json]) -> None:
    (view,) = pods.views(scene.observed(creating()), {"chat-new-1": events})

    assert view.failure is None


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(scene.pod(), id="a pod that serves"),
        pytest.param(scene.pod(ready=False), id="a pod that loads"),
        pytest.param(
            creating(conditions=[{"type": "PodScheduled", "status": "False"}]), id="a pod that the scheduler speaks of"
        ),
        pytest.param(
            scene.pod(ready=False, engine={"lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}}),
            id="a pod whose end speaks for itself",
        ),
        pytest.param(
            scene.pod(ready=False, engine={"state": {"waiting": {"reason": "CreateContainerConfigError"}}}),
            id="a pod whose waiting speaks for itself",
        ),
        pytest.param(
            scene.pod(ready=False, engine={"state": {"waiting": {"reason": "ImagePullBackOff"}}}),
            id="an image that is pulled without credentials",
        ),
    ],
)
def test_who_says_enough_is_not_asked_after(pod: Json) -> None:
    (view,) = pods.views(scene.observed(pod))

    assert not view.is_silent
