"""What pods say: which revision they are of, whether they serve, and what stands in their way, in plain words.

Owns reading pods, ReplicaSets and Deployments as the API server returns them. Pure. Next: `status.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_operator.labels import COST_BASIS_ANNOTATION
from sluice_operator.plan import Observed
from sluice_operator.pod_template import Object

_HASH_LABEL = "pod-template-hash"
_REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
# `CODE: message`, the last line of a program that could not start or go on.
_LAST_WORDS = re.compile(r"^([A-Z][A-Za-z]{3,40}): (.+)")
_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_KILLED = 137  # 128 + SIGKILL
_BAD_INPUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What stands in the way now."""

    reason: str
    message: str
    hint: str = ""
    pod: str = ""


HINTS = {
    "Unschedulable": "Free or add a node that fits, or change resources, accelerator or podTemplate.",
    "ImagePullFailed": "Check runtime.image, that nodes can reach its registry, and podTemplate.imagePullSecrets.",
    "ContainerConfigError": "Create the ConfigMap, Secret or volume that podTemplate names, or correct the name.",
    "OutOfMemory": "Raise resources.limits.memory, or lower cache.capacity, memoryPercent or hostSwapCapacity.",
    "ModelMissing": "Check spec.model.source: the path must exist in the image or on a volume mounted into the engine.",
    "ModelCorrupt": "Copy the model's files again, or choose another source.",
    "ModelUnsupported": "Choose a model of a supported architecture (Llama), or another dataType.",
    "DiskFull": "Free space on the node or on the volume that the message names.",
    "SocketInUse": "Delete the pod. If it comes back, look for what podTemplate runs beside the engine.",
    "SocketUnavailable": "Delete the pod. If it comes back, look at the node: /run/sluice lies in its memory.",
    "PortInUse": "Look for something in the pod that listens on 8080 or 9090; the gate needs both.",
    "ConfigRefused": "Mend the Secret of API keys, or install operator, gate and engine images of one version.",
    "InvalidConfig": "Install operator, gate and engine images of one version.",
    "EngineKilled": "If nobody did that, its liveness probe failed: see `kubectl logs --previous -c engine`.",
    "EngineHung": "The liveness probe restarts the engine. If it repeats, look at the device's health.",
    "EngineFailed": "See `kubectl logs -c engine`.",
    "CrashLoop": "See `kubectl logs --previous -c engine`.",
    "PodsRefused": "Change what the message names: a quota, a policy, or a field of the spec.",
    "PodFailed": "See `kubectl describe pod` for what ended it.",
    "Evicted": "Raise resources.requests, or free memory or disk on the node.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod that is not on its way out."""

    name: str
    ip: str
    is_current: bool
    """Of the Deployment's newest revision."""
    is_ready: bool
    is_running: bool
    cost_basis: str
    failure: Failure | None


def views(observed: Observed) -> tuple[PodView, ...]:
    """All pods that run or will, by name."""
    return tuple(view for view, phase in _kept(observed) if phase not in {"Succeeded", "Failed"})


def ended(observed: Observed) -> tuple[PodView, ...]:
    """Pods that failed as a whole, by name; an evicted one is kept beside its replacement for long."""
    return tuple(view for view, phase in _kept(observed) if phase == "Failed")


def _kept(observed: Observed) -> Iterator[tuple[PodView, str]]:
    newest = _newest_hash(observed.replica_sets)
    kept = [pod for pod in observed.pods if not pod["metadata"].get("deletionTimestamp")]
    for pod in sorted(kept, key=lambda pod: str(pod["metadata"]["name"])):
        yield _view(pod, newest), pod.get("status", {}).get("phase", "")


def rollout_is_observed(deployment: Object | None) -> bool:
    """Whether the Deployment's controller has seen the newest template, so that "current" means what was applied."""
    if deployment is None:
        return False
    return int(deployment.get("status", {}).get("observedGeneration", 0)) >= int(deployment["metadata"]["generation"])


def refusal(observed: Observed, deployment: Object | None) -> Failure | None:
    """Why the cluster lets no pods be made: a quota, a policy, a field that only pod validation refuses."""
    for item in (*observed.replica_sets, *([deployment] if deployment else [])):
        for condition in item.get("status", {}).get("conditions") or ():
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                return _failure("PodsRefused", condition.get("message", ""))
    return None


def _newest_hash(replica_sets: Sequence[Object]) -> str | None:
    def revision(item: Object) -> int:
        return int(item["metadata"].get("annotations", {}).get(_REVISION_ANNOTATION, 0))

    newest = max(replica_sets, key=revision, default=None)
    return None if newest is None else newest["metadata"].get("labels", {}).get(_HASH_LABEL)


def _view(pod: Object, newest: str | None) -> PodView:
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = _condition(pod, "Ready")
    is_ready = ready is not None and ready["status"] == "True"
    return PodView(
        name=metadata["name"],
        ip=status.get("podIP", ""),
        is_current=newest is not None and metadata.get("labels", {}).get(_HASH_LABEL) == newest,
        is_ready=is_ready,
        is_running=status.get("phase") == "Running",
        cost_basis=metadata.get("annotations", {}).get(COST_BASIS_ANNOTATION, ""),
        # A pod that serves has recovered, whatever its containers went through before.
        failure=None if is_ready else _pod_failure(pod),
    )


def _pod_failure(pod: Object) -> Failure | None:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    scheduled = _condition(pod, "PodScheduled")
    if scheduled and scheduled["status"] == "False":
        return _failure("Unschedulable", scheduled.get("message", ""), name)
    if status.get("phase") == "Failed":
        reason = "Evicted" if status.get("reason") == "Evicted" else "PodFailed"
        return _failure(reason, status.get("message") or status.get("reason") or "the pod failed", name)
    return next((found for container in _containers(status) if (found := _container_failure(container, name))), None)


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("containerStatuses") or ()
    yield from status.get("initContainerStatuses") or ()


def _container_failure(container: Mapping[str, Any], pod: str) -> Failure | None:
    name, state = container["name"], container.get("state", {})
    waiting = state.get("waiting")
    if waiting:
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE_REASONS:
            return _failure("ImagePullFailed", f"{name}: {message or reason}", pod)
        if reason in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
            return _failure("ContainerConfigError", f"{name}: {message or reason}", pod)
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    return _ended_failure(name, ended, pod) if ended else None


def _ended_failure(name: str, ended: Mapping[str, Any], pod: str) -> Failure | None:
    code, reason = ended.get("exitCode", 0), ended.get("reason", "")
    # A termination message, or the end of the log.
    final = ((ended.get("message") or "").strip().splitlines() or [""])[-1]
    if reason == "OOMKilled":
        return _failure("OutOfMemory", f"{name} used more memory than its limit and was killed", pod)
    if (match := _LAST_WORDS.match(final)) and match[1] in HINTS:
        return _failure(match[1], f"{name}: {match[2]}", pod)
    if code == _KILLED:
        return _failure("EngineKilled" if name == "engine" else "CrashLoop", f"{name} was killed (exit code 137)", pod)
    if reason in {"ContainerCannotRun", "StartError"}:
        return _failure("ContainerConfigError", f"{name}: {final or reason}", pod)
    if code == 0 and reason == "Completed":
        return None
    words = f": {final}" if final else ""
    return _failure(
        "InvalidConfig" if code == _BAD_INPUT else "CrashLoop", f"{name} ended with exit code {code}{words}", pod
    )


def _condition(pod: Object, kind: str) -> Mapping[str, Any] | None:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)


def _failure(reason: str, message: str, pod: str = "") -> Failure:
    return Failure(reason=reason, message=message, hint=HINTS.get(reason, ""), pod=pod)


def engine_failure(reason: str, message: str, pod: str) -> Failure:
    """What an engine's own state says about itself."""
    return _failure(reason, message, pod)
