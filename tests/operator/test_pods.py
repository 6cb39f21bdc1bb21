"""What pods say about their troubles."""

from __future__ import annotations

from typing import Any

import pytest

import operator_scene as scene
from sluice_operator.observed import pods, refusals
from sluice_operator.observed.failures import HINTS

Json = dict[str, Any]


def waiting(reason: str, message: str = "") -> Json:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, *, reason: str = "Error", message: str = "", back_off: bool = True) -> Json:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    if back_off:
        return {**waiting("CrashLoopBackOff", "back-off 10s restarting"), "lastState": last}
    return {"state": {"running": {}}, "lastState": last}


UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
VLLM_OUT_OF_MEMORY = """(EngineCore pid=7) ValueError: No available memory for the cache blocks. Try increasing it.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def unscheduled(message: str, *, reason: str = "Unschedulable") -> Json:
    return {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}


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
            "SecretMissing",
            'secret "k" not found',
            id="a Secret is missing",
        ),
        pytest.param(
            scene.pod(ready=False, engine=waiting("CreateContainerConfigError", "couldn't find key k in Secret llm/s")),
            "SecretMissing",
            "key k",
            id="a Secret without the key",
        ),
        pytest.param(
            scene.pod(ready=False, engine=waiting("CreateContainerConfigError", 'configmap "c" not found')),
            "ConfigMapMissing",
            'configmap "c"',
            id="a ConfigMap is missing",
        ),
        pytest.param(
            scene.pod(ready=False, engine=waiting("CreateContainerError", "failed to generate spec: no such mount")),
            "ContainerConfigError",
            "no such mount",
            id="a container that cannot be made",
        ),
        pytest.param(
            scene.pod(ready=False, phase="Pending", conditions=[unscheduled('persistentvolumeclaim "w" not found')]),
            "ClaimMissing",
            'persistentvolumeclaim "w" not found',
            id="a claim is missing",
        ),
        pytest.param(
            scene.pod(ready=False, phase="Pending", conditions=[unscheduled(UNBOUND)]),
            "ClaimUnbound",
            "unbound immediate",
            id="a claim is not bound",
        ),
        pytest.param(
            scene.pod(ready=False, phase="Pending", conditions=[unscheduled("", reason="SchedulingGated")]),
            "SchedulingGated",
            "a scheduling gate",
            id="a scheduling gate",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(1, message=VLLM_OUT_OF_MEMORY)),
            "DeviceOutOfMemory",
            "No available memory for the cache blocks",
            id="a cause above a foreign engine's last line",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(1, message="OutOfMemory: /m does not fit: CUDA out of memory. Tried")),
            "DeviceOutOfMemory",
            "CUDA out of memory",
            id="the device's memory, in the engine's last words",
        ),
        pytest.param(
            scene.pod(ready=False, engine=ended(0, reason="Completed")),
            "CrashLoop",
            "exit code 0",
            id="a good end again and again",
        ),
        pytest.param(
            scene.pod(ready=False, conditions=[{"type": "ContainersReady", "status": "True"}]),
            "NodeUnreachable",
            "says nothing any more",
            id="readiness taken by the node's controller",
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
            id="the memory is too small",
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


def test_a_gate_that_refuses_its_keys_is_no_matter_of_images() -> None:
    said = "sluice_sidecar: api keys: team-b: line 1: must be a key of 16 to 512 letters"

    (view,) = pods.views(scene.observed(scene.pod(ready=False, gate=ended(2, message=said))))

    assert view.failure is not None
    assert view.failure.reason == "InvalidConfig"
    assert "admission.apiKeysSecretRef" in view.failure.hint
    assert "images" not in view.failure.hint


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


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Evicted", "Evicted"),
        ("NodeShutdown", "PodFailed"),
        ("OutOfcpu", "NodeRefused"),
        ("UnexpectedAdmissionError", "NodeRefused"),
    ],
)
def test_a_pod_that_ended_as_a_whole_is_only_a_failure(reason: str, told: str) -> None:
    seen = scene.observed(scene.pod(ready=False, phase="Failed", reason=reason, message="The node was low on memory."))

    (failed,) = pods.ended(seen)

    assert pods.views(seen) == ()
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.message) == (told, "The node was low on memory.")


def test_every_known_failure_has_a_hint() -> None:
    assert all(text.endswith(".") for text in HINTS.values())


def test_pods_on_their_way_out_are_not_counted() -> None:
    seen = scene.observed(scene.pod("a", deleting=True), scene.pod("b"), scene.pod("c", phase="Succeeded", ready=False))

    assert [view.name for view in pods.views(seen)] == ["b"]


def test_the_newest_revision_is_the_current_one() -> None:
    seen = scene.observed(scene.pod("a", revision="old"), scene.pod("b", revision="new"))

    assert [view.is_current for view in pods.views(seen)] == [False, True]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param('pods "c-" is forbidden: exceeded quota: gpus, requested: x', "QuotaExceeded", id="a quota"),
        pytest.param(
            'pods "c-" is forbidden: failed quota: q: must specify cpu', "QuotaExceeded", id="a quota's demand"
        ),
        pytest.param(
            'pods "c-" is forbidden: violates PodSecurity "restricted:latest": hostPath', "PolicyRefused", id="standard"
        ),
        pytest.param(
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", "PolicyRefused", id="a policy's rule"
        ),
        pytest.param('admission webhook "w.x" denied the request: no', "PolicyRefused", id="a webhook"),
        pytest.param(
            'pods "c-" is forbidden: error looking up service account llm/me: serviceaccount "me" not found',
            "ServiceAccountMissing",
            id="an account",
        ),
        pytest.param('pods "c-" is forbidden: no PriorityClass with name x was found', "PodsRefused", id="a class"),
    ],
)
def test_a_refusal_of_the_pods_themselves_is_found_at_the_replica_set(message: str, reason: str) -> None:
    refusing = scene.replica_set("new", 2)
    refusing["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": message}]}

    found = refusals.of_pods(scene.observed(replica_sets=(refusing,)), None)

    assert found is not None
    assert (found.reason, found.message) == (reason, message)
    assert found.hint


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("failed to authorize: 401 Unauthorized", "credentials"),
        ("manifest unknown: x:1 not found", "name or tag"),
        ("dial tcp: lookup registry.example on 10.0.0.1:53: no such host", "cannot reach"),
        ("something else", "runtime.image"),
    ],
)
def test_an_image_that_cannot_be_pulled_hints_at_the_cause(message: str, hint: str) -> None:
    (view,) = pods.views(scene.observed(scene.pod(ready=False, engine=waiting("ErrImagePull", message))))

    assert view.failure is not None
    assert hint in view.failure.hint


def test_readiness_that_a_readiness_gate_holds_back_is_no_lost_node() -> None:
    pod = scene.pod(ready=False, conditions=[{"type": "ContainersReady", "status": "True"}])
    pod["status"]["conditions"][0]["reason"] = "ReadinessGatesNotReady"

    (view,) = pods.views(scene.observed(pod))

    assert view.failure is None


def test_a_pod_that_serves_tells_of_its_last_end_only_after_the_second() -> None:
    last = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}
    once, twice = (scene.pod(engine={"restartCount": count, "lastState": {"terminated": last}}) for count in (1, 2))

    (first,), (second,) = pods.views(scene.observed(once)), pods.views(scene.observed(twice))

    assert first.relapse is None
    assert second.failure is None
    assert second.relapse is not None
    assert (second.relapse.reason, second.relapsed_at) == ("OutOfMemory", "2026-01-01T00:00:00Z")
    assert "has been restarted 2 times" in second.relapse.message
