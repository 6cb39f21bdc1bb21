"""Why a service is as it is: what its status, its pods, their events, their logs and their gates say, joined. Pure.

Owns the choice of what is worth saying and its order: the answer first, then what to do, then what it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_operator.observed.loading import loading_text
from sluice_operator.observed.moments import ago, last_told
from sluice_operator.status import owners
from sluice_operator.status.conditions.view import condition
from sluice_operator.status.noise import explains
from sluice_sidecar.telemetry.state import GateState

Object = Mapping[str, Any]

# What a condition has to be where all is well; of the others, what they say is worth reading.
_WELL = {
    "Ready": {"True"}, "Available": {"True"}, "Progressing": {"False"}, "ModelLoaded": {"True"},
    "AdmissionOpen": {"True"}, "SLOFeasible": {"True"}, "SLOMet": {"True", "Unknown"}, "Degraded": {"False"},
}  # fmt: skip
_REPEATED = {"Reconciling", "Stalled"}
_MOST_EVENTS = 8
_DOES_IT_RUN = "If that lasts: does the operator run? `kubectl -n sluice-system get pods`."
_BUSY_HINT = "More replicas let more in; where KV blocks are short a larger cache, else a looser promise in spec.slo."
_INFEASIBLE_HINT = (
    "If the node was busy while the pod measured, delete the pod: the next one measures anew. "
    "Else relax spec.slo to what the message says, or choose other hardware."
)
_NO_KEYS_HINT = "Create the Secret, one entry a tenant, named for it: pods take it within minutes, and none restarts."
_STORM_PAGE = "docs/runbooks/SluicePreemptionStorm.md"
_NO_STATUS = "The operator has said nothing about it yet. Does it run? `kubectl -n sluice-system get pods`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was found out."""

    service: Object
    pods: Sequence[Object] | None = None
    """None: they could not be read."""
    events: Sequence[Object] = ()
    """Of the service, its pods and its ReplicaSets."""
    children: Sequence[Object] = ()
    """The service's objects, with their managedFields."""
    gates: Mapping[str, GateState] = field(default_factory=dict)
    """By pod; of those that answer."""
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The last lines of what `POD/CONTAINER` wrote before it ended, or of what it writes."""
    now: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to tell."""

    service: str
    """Namespace and name."""
    is_well: bool
    """Nothing stands in the way: it is Ready, and lets requests in."""
    verdict: str
    hint: str = ""
    conditions: tuple[str, ...] = ()
    """Those that are not as they should be."""
    pods: tuple[str, ...] = ()
    headroom: tuple[str, ...] = ()
    foreign_fields: tuple[str, ...] = ()
    """Fields of its objects that others set, and what to do about them."""
    events: tuple[str, ...] = ()
    """The newest first."""
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)


def diagnose(evidence: Evidence) -> Answer:
    """The answer to "why?"."""
    service = evidence.service
    metadata, status = service["metadata"], service.get("status") or {}
    name = f"{metadata['namespace']}/{metadata['name']}"
    is_well, verdict, hint = _contradiction(status, evidence.pods) or _verdict(evidence)
    return Answer(
        service=name,
        is_well=is_well,
        verdict=verdict,
        hint=hint,
        conditions=tuple(_conditions(status, evidence.now)),
        pods=tuple(_pod(pod, evidence.gates.get(pod["metadata"]["name"])) for pod in _by_name(evidence.pods or ())),
        headroom=tuple(_headroom(name, gate) for name, gate in sorted(evidence.gates.items())),
        foreign_fields=tuple(owners.told(evidence.children, evidence.now)),
        events=tuple(_events(evidence)),
        logs=evidence.logs,
    )


def tell(answer: Answer) -> Iterator[str]:
    """The answer as lines of text."""
    yield f"{answer.service}: {answer.verdict}"
    if answer.hint:
        yield f"  → {answer.hint}"
    sections = {
        "conditions": answer.conditions,
        "pods": answer.pods,
        "headroom": answer.headroom,
        "set by others": answer.foreign_fields,
        "events, newest first": answer.events,
        **{f"last lines of {where}": tuple(lines) for where, lines in answer.logs.items()},
    }
    for title, lines in sections.items():
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)


def ended_containers(pods: Sequence[Object]) -> list[tuple[str, str, bool]]:
    """Whose logs are worth reading, as pod, container, and whether it is those of the run before; at most two."""
    found = []
    for pod in _by_name(pods):
        status = pod.get("status", {})
        if is_ready(pod):
            continue
        for container in (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())):
            state, last = container.get("state", {}), container.get("lastState", {})
            if state.get("terminated") or last.get("terminated"):
                found.append((pod["metadata"]["name"], container["name"], not state.get("terminated")))
    return found[:2]


def _contradiction(status: Object, pods: Sequence[Object] | None) -> tuple[bool, str, str] | None:
    """What is wrong where the status says that pods serve and none does; None where it does not, or nobody knows."""
    told = status.get("readyReplicas", 0)
    if pods is None or not told or any(is_ready(pod) for pod in pods):
        return None
    return False, f"the status counts {told} that serve, and no pod is ready", _DOES_IT_RUN


def _verdict(evidence: Evidence) -> tuple[bool, str, str]:
    """Whether all is well, the answer, and what to do."""
    service = evidence.service
    metadata, status = service["metadata"], service.get("status") or {}
    if not status.get("conditions"):
        return False, _NO_STATUS, ""
    generation, seen = metadata.get("generation", 0), status.get("observedGeneration", 0)
    if generation != seen:
        text = f"the operator has not seen the newest change yet (generation {generation}, it told of {seen})"
        return False, text, _DOES_IT_RUN
    ready = condition(status, "Ready")
    if failure := status.get("failure"):
        where = f" (pod {failure['pod']})" if failure.get("pod") else ""
        words = "serves, and yet" if ready.get("status") == "True" else "is not Ready"
        return False, f"{words}: {failure['reason']}: {failure['message']}{where}", failure.get("hint", "")
    if ready.get("status") != "True":
        return False, f"is not Ready: {ready.get('reason', '')}: {ready.get('message', '')}", _way_out(ready)
    return _storm(evidence) or _of_a_ready_service(ready, status)


def _of_a_ready_service(ready: Object, status: Object) -> tuple[bool, str, str]:
    if ready.get("reason") == "ScaledToZero":
        return True, "is scaled to zero.", ""
    door, kept = condition(status, "AdmissionOpen"), condition(status, "SLOMet")
    if door.get("status") == "False":
        hint = {"Busy": _BUSY_HINT, "NoApiKeys": _NO_KEYS_HINT}.get(door["reason"], "")
        return False, f"serves, and lets nobody in now: {door['reason']}: {door['message']}", hint
    if kept.get("status") == "False":
        return False, f"serves, and misses its promise: {kept['message']}", "See the headroom of its pods below."
    feasible = condition(status, "SLOFeasible")
    if feasible.get("status") == "False":  # with slo.enforcement: Observe: else it is not Ready
        return False, f"serves, and cannot keep its promise: {feasible['message']}", _INFEASIBLE_HINT
    return True, f"is well: {ready.get('message', '')}", ""


def _storm(evidence: Evidence) -> tuple[bool, str, str] | None:
    """The verdict where a pod preempts more often than the spec allows each; None where none does, or nobody knows."""
    admission = (evidence.service.get("spec") or {}).get("admission") or {}
    allowed = admission.get("preemptionsPerMinute")
    pod, gate = max(evidence.gates.items(), key=lambda one: one[1].measured.preemptions_per_minute, default=("", None))
    if allowed is None or gate is None or gate.measured.preemptions_per_minute <= allowed:
        return None
    rate = f"{gate.measured.preemptions_per_minute:g} requests a minute"
    text = f"serves, and preempts {rate} (admission.preemptionsPerMinute is {allowed:g}; pod {pod})"
    if admission.get("mode") == "Observe":
        return False, text, f"Nobody is refused for load: set admission.mode: Enforce ({_STORM_PAGE})."
    return False, text, f"Lower admission.kvCeilingPercent, raise cache.capacity, or add replicas ({_STORM_PAGE})."


def _way_out(ready: Object) -> str:
    if ready.get("reason") == "PromiseInfeasible":
        return f"{_INFEASIBLE_HINT[:-1]}, or set slo.enforcement: Observe."
    return ""


def _conditions(status: Object, now: str) -> Iterator[str]:
    for one in status.get("conditions") or ():
        if one["type"] in _REPEATED or one["status"] in _WELL.get(one["type"], {"True", "Unknown"}):
            continue
        since = ago(one.get("lastTransitionTime", ""), now)
        yield f"{one['type']}={one['status']}  {one['reason']}: {one['message']}" + (f"  [{since}]" if since else "")


def _pod(pod: Object, gate: GateState | None) -> str:
    metadata, status = pod["metadata"], pod.get("status", {})
    parts = ["leaving" if metadata.get("deletionTimestamp") else status.get("phase", "Unknown")]
    parts.append("ready" if is_ready(pod) else "not ready")
    if node := pod.get("spec", {}).get("nodeName"):
        parts.append(f"on {node}")
    parts += [
        f"the scheduler says: {one.get('message', '')}"
        for one in status.get("conditions") or ()
        if one["type"] == "PodScheduled" and one["status"] == "False"
    ]
    for container in (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())):
        parts += _container(container)
    if gate is not None and gate.engine is not None and gate.engine.phase == "loading":
        parts.append(loading_text(gate.engine))
    return f"{metadata['name']}: {', '.join(parts)}"


def _container(container: Object) -> Iterator[str]:
    waiting = container.get("state", {}).get("waiting")
    if waiting and waiting.get("reason") not in {None, "PodInitializing", "ContainerCreating"}:
        yield f"{container['name']} waits: {waiting['reason']}"
    if count := container.get("restartCount"):
        yield f"{container['name']} was restarted {count} time{'' if count == 1 else 's'}"


def _headroom(name: str, gate: GateState) -> str:
    door, room = gate.admission, gate.headroom
    watched = f"open (Observe; Enforce would refuse: {door.reason})" if door.only_watches else "open"
    parts = ["draining" if gate.draining else f"shut: {gate.shut}" if gate.shut else watched]
    parts.append(f"{door.ledger_requests:,} inside, {door.waiting_at_door:,} at the door")
    if room is not None:
        parts.append(f"room for {room.slots:,} requests and {room.blocks:,} KV blocks")
        if room.class_cut:
            parts.append(f"classes down to {room.class_cut} are let in")
    parts.append(f"KV {gate.measured.kv_usage_percent:.0f} %")
    if gate.measured.preemptions_per_minute:
        parts.append(f"{gate.measured.preemptions_per_minute:g} preemptions a minute")
    if refused := {code: count for code, count in sorted(door.refused_total.items()) if count}:
        parts.append("refused since its start: " + ", ".join(f"{code} {count:,}" for code, count in refused.items()))
    if gate.freshness != "fresh":
        parts.append(f"the engine's state is {gate.freshness}")
    return f"{name}: {'; '.join(parts)}"


def _events(evidence: Evidence) -> Iterator[str]:
    pods = {pod["metadata"]["name"]: pod for pod in evidence.pods or ()}

    def is_worth_telling(event: Object) -> bool:
        name = event["involvedObject"]["name"] if event["involvedObject"]["kind"] == "Pod" else ""
        return event.get("type") == "Warning" and explains(event, pods.get(name), evidence.gates.get(name))

    told = sorted(filter(is_worth_telling, evidence.events), key=last_told, reverse=True)[:_MOST_EVENTS]
    for event in told:
        about = event["involvedObject"]
        count = f" (x{event['count']})" if event.get("count", 1) > 1 else ""
        since = ago(last_told(event), evidence.now)
        when = f"{since}{count}: " if since else ""
        message = " ".join(str(event.get("message", "")).split())
        yield f"{when}{about['kind'].lower()}/{about['name']}: {event['reason']}: {message}"


def is_ready(pod: Object) -> bool:
    """Whether a pod serves."""
    return condition(pod.get("status", {}), "Ready").get("status") == "True"


def _by_name(pods: Sequence[Object]) -> list[Object]:
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
