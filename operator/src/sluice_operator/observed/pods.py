"""What pods say: which revision they are of, whether they serve, and what stands in their way, in plain words.

Owns reading pods, ReplicaSets and Deployments as the API server returns them. Pure. Beside it: `containers.py`,
`kubelet.py` and `refusals.py`, which know the words of each. Next: `status.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_operator.observed import containers, kubelet, refusals
from sluice_operator.observed.failures import Failure, failure
from sluice_operator.plan import Observed
from sluice_operator.rendering.labels import COST_BASIS_ANNOTATION
from sluice_operator.rendering.pod_template import Object

Events = Mapping[str, Sequence[Object]]
"""What the kubelet told of pods, by their names."""

_HASH_LABEL = "pod-template-hash"
_REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
# A pod that ended with one of these never ran: the node had no room, or lost a device, after the scheduler chose it.
_NODE_REFUSES = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "Topology")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod that is not on its way out."""

    name: str
    uid: str
    ip: str
    is_current: bool
    """Of the Deployment's newest revision."""
    is_ready: bool
    is_running: bool
    is_silent: bool
    """It does not serve, and its status does not say all: the kubelet's events may."""
    created_at: str
    is_undecided: bool
    """No scheduler has said anything of it yet."""
    claims: tuple[str, ...]
    """PersistentVolumeClaims that it mounts."""
    engine_began_at: str
    """Since when its engine has run, as Kubernetes writes it; empty while it does not."""
    cost_basis: str
    failure: Failure | None
    relapse: Failure | None
    """It serves and has ended at least twice: what the last end was."""
    relapsed_at: str
    """When that was, as Kubernetes writes it."""


def views(observed: Observed, events: Events | None = None) -> tuple[PodView, ...]:
    """All pods that run or will, by name; `events` are those of the silent ones."""
    return tuple(view for view, phase in _kept(observed, events or {}) if phase not in {"Succeeded", "Failed"})


def ended(observed: Observed) -> tuple[PodView, ...]:
    """Pods that failed as a whole, by name; an evicted one is kept beside its replacement for long."""
    return tuple(view for view, phase in _kept(observed, {}) if phase == "Failed")


def leaving(observed: Observed) -> int:
    """How many pods are on their way out and still hold what they hold: devices, quota, a node's room."""
    going = (pod for pod in observed.pods if pod["metadata"].get("deletionTimestamp"))
    return sum(pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"} for pod in going)


def _kept(observed: Observed, events: Events) -> Iterator[tuple[PodView, str]]:
    newest = newest_revision(observed.replica_sets)
    kept = [pod for pod in observed.pods if not pod["metadata"].get("deletionTimestamp")]
    for pod in sorted(kept, key=lambda pod: str(pod["metadata"]["name"])):
        view = _view(pod, newest, events.get(pod["metadata"]["name"], ()))
        yield view, pod.get("status", {}).get("phase", "")


def rollout_is_observed(deployment: Object | None) -> bool:
    """Whether the Deployment's controller has seen the newest template, so that "current" means what was applied."""
    if deployment is None:
        return False
    return int(deployment.get("status", {}).get("observedGeneration", 0)) >= int(deployment["metadata"]["generation"])


def newest_revision(replica_sets: Sequence[Object]) -> str | None:
    """The hash of the Deployment's newest template; None where no ReplicaSet is there yet."""

    def revision(item: Object) -> int:
        return int(item["metadata"].get("annotations", {}).get(_REVISION_ANNOTATION, 0))

    newest = max(replica_sets, key=revision, default=None)
    return None if newest is None else revision_of(newest)


def revision_of(item: Object) -> str | None:
    """The hash of the template that a pod or a ReplicaSet is of."""
    found: str | None = item["metadata"].get("labels", {}).get(_HASH_LABEL)
    return found


def _view(pod: Object, newest: str | None, events: Sequence[Object]) -> PodView:
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = _condition(pod, "Ready")
    is_ready = ready is not None and ready["status"] == "True"
    relapsed_at, relapse = _relapse(pod) if is_ready else ("", None)
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        ip=status.get("podIP", ""),
        is_current=newest is not None and revision_of(pod) == newest,
        is_ready=is_ready,
        is_running=status.get("phase") == "Running",
        is_silent=not is_ready and _is_silent(pod),
        created_at=metadata.get("creationTimestamp", ""),
        is_undecided=status.get("phase") == "Pending" and _condition(pod, "PodScheduled") is None,
        claims=tuple(_claims(pod)),
        engine_began_at=_engine_began_at(status),
        cost_basis=metadata.get("annotations", {}).get(COST_BASIS_ANNOTATION, ""),
        # A pod that serves has recovered, whatever its containers went through before.
        failure=None if is_ready else _pod_failure(pod, events),
        relapse=relapse,
        relapsed_at=relapsed_at,
    )


def _claims(pod: Object) -> Iterator[str]:
    for volume in pod.get("spec", {}).get("volumes") or ():
        if claim := volume.get("persistentVolumeClaim"):
            yield claim["claimName"]


def _engine_began_at(status: Mapping[str, Any]) -> str:
    found = (one["state"] for one in status.get("containerStatuses") or () if one["name"] == "engine")
    return next((state["running"].get("startedAt") or "" for state in found if state.get("running")), "")


def _is_silent(pod: Object) -> bool:
    """Whether a container waits, or ended in a way that events may explain."""
    if (scheduled := _condition(pod, "PodScheduled")) and scheduled["status"] == "False":
        return False
    has_credentials = bool(pod.get("spec", {}).get("imagePullSecrets"))
    return any(_is_unexplained(one, has_credentials=has_credentials) for one in _containers(pod.get("status", {})))


def _is_unexplained(container: Mapping[str, Any], *, has_credentials: bool) -> bool:
    if containers.may_have_failed_a_probe(container):
        return True
    found = containers.container_failure(container, "")
    if found is None:
        return bool(container.get("state", {}).get("waiting"))
    # Of the Secrets to pull with, only an event says that they do not exist.
    return found.reason == "ImagePullFailed" and has_credentials


def _pod_failure(pod: Object, events: Sequence[Object]) -> Failure | None:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    scheduled = _condition(pod, "PodScheduled")
    if scheduled and scheduled["status"] == "False":
        return refusals.of_scheduler(scheduled, name)
    reason, message = status.get("reason") or "", status.get("message") or ""
    if status.get("phase") == "Failed":
        told = "Evicted" if reason == "Evicted" else "NodeRefused" if reason.startswith(_NODE_REFUSES) else "PodFailed"
        return failure(told, message or reason or "the pod failed", name)
    if _is_lost(pod):
        node = pod.get("spec", {}).get("nodeName", "")
        return failure("NodeUnreachable", f"its node {node} says nothing any more", name)
    for container in _containers(status):
        if found := _container_failure(container, status.get("initContainerStatuses") or (), events, name):
            return found
    return kubelet.waiting_failure(events, name)


def _container_failure(
    container: Mapping[str, Any], gates: Sequence[Mapping[str, Any]], events: Sequence[Object], pod: str
) -> Failure | None:
    if containers.may_have_failed_a_probe(container) and (found := kubelet.probe_failure(container, events, pod)):
        return next(_gates_fault(container, gates, events, pod), found)
    found = containers.container_failure(container, pod)
    if found and found.reason == "ImagePullFailed" and (more := kubelet.missing_credentials(events)):
        return dataclasses.replace(found, message=f"{found.message} ({more})")
    return found


def _gates_fault(
    container: Mapping[str, Any], gates: Sequence[Mapping[str, Any]], events: Sequence[Object], pod: str
) -> Iterator[Failure]:
    """The engine's probes are answered by the gate: one that failed for the gate's sake is the gate's failure."""
    began, _ = containers.last_run(container)
    for gate in gates:
        if gate is not container and containers.may_have_failed_a_probe(gate) and containers.last_run(gate)[1] >= began:
            found = kubelet.probe_failure(gate, events, pod)
            yield from [found] if found else []


def _is_lost(pod: Object) -> bool:
    """Whether the node's controller, not the kubelet, took the pod's readiness: its containers' is left as it was."""
    ready, inner = _condition(pod, "Ready"), _condition(pod, "ContainersReady")
    by_kubelet = ready is not None and ready.get("reason") == "ReadinessGatesNotReady"
    return bool(inner and ready and inner["status"] == "True" and ready["status"] == "False" and not by_kubelet)


def _relapse(pod: Object) -> tuple[str, Failure | None]:
    """When a pod that serves ended last, and how, if that was not for the first time."""
    name = pod["metadata"]["name"]
    for container in _containers(pod.get("status", {})):
        count = container.get("restartCount", 0)
        last = container.get("lastState", {}).get("terminated")
        if count < 2 or not last:
            continue
        if found := containers.ended_failure(container["name"], last, name):
            at = last.get("finishedAt") or ""
            text = f"it serves, and has been restarted {count} times, the last time at {at}: {found.message}"
            return at, dataclasses.replace(found, message=text)
    return "", None


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("containerStatuses") or ()
    yield from status.get("initContainerStatuses") or ()


def _condition(pod: Object, kind: str) -> Mapping[str, Any] | None:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)
