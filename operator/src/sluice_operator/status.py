"""The status of an InferenceService, from what is observed now.

Owns the conditions: every one carries the generation it speaks of, a stable reason and a sentence, and its
lastTransitionTime moves only with its status. Nothing sticks: a claim that is no longer seen to hold is no longer made.
Pure. Before: `pods.py`, `figures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice_engine import codec
from sluice_operator import figures, labels, obeyed, pods, refusals, render
from sluice_operator.failures import Failure, failure
from sluice_operator.figures import PodState
from sluice_operator.loading import progress
from sluice_operator.moments import seconds_between
from sluice_operator.plan import Observed
from sluice_operator.pods import PodView
from sluice_operator.spec import ServiceSpec
from sluice_sidecar.telemetry.state import GateState

Json = dict[str, Any]

_MESSAGE_LIMIT = 2048  # as the CRD has it
# So long after it ended again, a pod that serves counts as sick.
_RELAPSE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A condition before it is dated."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a status is computed from."""

    generation: int
    spec: ServiceSpec | None
    """None: the spec could not be understood; `problem` says why."""
    observed: Observed = field(default_factory=Observed)
    gates: Mapping[str, GateState] = field(default_factory=dict)
    """What the gate of each pod last said, by the pod's name."""
    events: pods.Events = field(default_factory=dict)
    """What the kubelet told of the pods that say too little themselves."""
    problem: Failure | None = None
    """What kept the operator from applying what is wanted."""
    kinds: frozenset[str] = frozenset()
    """The optional kinds whose definition the cluster has."""


def compute(situation: Situation, previous: Mapping[str, Any], now: str) -> Json:
    """The whole status; `previous` is the one in the resource, `now` the time as Kubernetes writes it."""
    view = _View(situation, previous, now)
    claims = view.claims()
    status: Json = {
        "observedGeneration": situation.generation,
        "conditions": _dated(claims, previous.get("conditions", ()), situation.generation, now),
        "replicas": len(view.pods),
        "readyReplicas": len(view.ready),
    }
    status["measured"] = figures.measured(view.states)
    status["derived"] = figures.derived(view.judged) or (previous.get("derived") if not view.states else None)
    if spec := situation.spec:
        status["model"] = spec.model.served_name
        status["selector"] = ",".join(f"{key}={value}" for key, value in labels.selector(spec).items())
        status["url"] = render.url(spec)
        status["stepCost"] = _step_cost(spec, view, previous)
    else:
        # What runs goes on running, and scaling needs the selector.
        status |= {kept: previous.get(kept) for kept in ("model", "selector", "url", "stepCost")}
    if view.failure:
        failure = {"reason": view.failure.reason, "message": view.failure.message[:_MESSAGE_LIMIT]}
        status["failure"] = failure | {key: text for key in ("hint", "pod") if (text := getattr(view.failure, key))}
    return {key: value for key, value in status.items() if value is not None}


def _step_cost(spec: ServiceSpec, view: _View, previous: Mapping[str, Any]) -> Json | None:
    basis = labels.cost_basis(spec)
    on_basis = [state for state in view.states if state.pod.cost_basis == basis]
    # A cost measured on other hardware says nothing; it is forgotten once only such pods are left.
    stale = any(pod.is_ready for pod in view.pods) and not any(pod.cost_basis == basis for pod in view.pods)
    published = None if stale else previous.get("stepCost")
    return figures.step_cost(on_basis, spec.live.slo.inter_token_latency_us, published)


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """One condition of a status; empty when it has none."""
    return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})


def _dated(claims: Mapping[str, Claim], previous: Any, generation: int, now: str) -> list[Json]:  # noqa: ANN401  # JSON
    before = {one["type"]: one for one in previous}
    dated = []
    for kind, claim in claims.items():
        old = before.get(kind)
        unchanged = old is not None and old["status"] == claim.status
        dated.append(
            {
                "type": kind,
                "status": claim.status,
                "observedGeneration": generation,
                "reason": claim.reason,
                "message": claim.message[:_MESSAGE_LIMIT],
                "lastTransitionTime": old["lastTransitionTime"] if old is not None and unchanged else now,
            }
        )
    return dated


class _View:
    """One look at a situation; each condition is a property of it."""

    def __init__(self, situation: Situation, previous: Mapping[str, Any], now: str) -> None:
        self.spec, self.problem = situation.spec, situation.problem
        observed = situation.observed
        self.deployment = next((one for one in observed.owned.values() if one["kind"] == "Deployment"), None)
        self.leaving = pods.leaving(observed)
        seen, refused = pods.views(observed, situation.events), refusals.of_pods(observed, self.deployment)
        # What a pod waits for is still held by one of ours that drains: nothing is wrong.
        self.waits_for_drain = bool(self.leaving) and (
            any(_waits_for_room(pod) for pod in seen) or (refused is not None and refused.reason == "QuotaExceeded")
        )
        if self.waits_for_drain:
            seen = tuple(replace(pod, failure=None) if _waits_for_room(pod) else pod for pod in seen)
            refused = None
        self.pods = seen
        self.settled = pods.rollout_is_observed(self.deployment)
        self.current = [pod for pod in self.pods if pod.is_current and self.settled]
        self.ended = [pod for pod in pods.ended(observed) if pod.is_current and self.settled]
        self.old = [pod for pod in self.pods if pod not in self.current]
        self.ready = [pod for pod in self.pods if pod.is_ready]
        self.ready_current = [pod for pod in self.current if pod.is_ready]
        self.states = [PodState(pod=pod, gate=gate) for pod in self.pods if (gate := situation.gates.get(pod.name))]
        self.live_hash = codec.digest(self.spec.live) if self.spec else ""
        is_news = (
            previous.get("observedGeneration") != situation.generation
            or condition(previous, "Progressing").get("reason") == obeyed.PENDING
        )
        states = {state.pod.name: state for state in self.states}
        self.pending = obeyed.pending(self.ready_current, states, self.live_hash, is_news=is_news)
        # The promise is judged by the newest pods that have measured; the old ones are on their way out. Of those, by
        # pods that have it already: what the others derived follows from the one before.
        measured = [state for state in self.states if state.engine and state.engine.derived]
        newest = [state for state in measured if state.pod in self.current] or measured
        self.judged = [state for state in newest if obeyed.obeys(state, self.live_hash)] or newest
        self.wanted = self.spec.replicas if self.spec else 0
        self.failure = self.problem or refused or self._pod_failure() or self._relapse(now)

    def claims(self) -> dict[str, Claim]:
        """All conditions, in the order in which they are read."""
        return {
            "Ready": self._ready(),
            "Available": self._available(),
            "Progressing": self._progressing(),
            "ModelLoaded": self._model_loaded(),
            "AdmissionOpen": self._admission_open(),
            "SLOFeasible": self._slo_feasible(),
            "SLOMet": self._slo_met(),
            "Degraded": self._degraded(),
        }

    def _relapse(self, now: str) -> Failure | None:
        """A pod that serves, ended a while ago, and not for the first time."""
        since = _RELAPSE_S
        found = (pod.relapse for pod in self.pods if pod.relapse and seconds_between(pod.relapsed_at, now) < since)
        return next(found, None)

    def _pod_failure(self) -> Failure | None:
        for state in self.states:
            engine = state.engine
            if engine and engine.hung:
                text = f"a step has run for {engine.step_running_us // 1_000_000} s"
                return failure("EngineHung", text, state.pod.name)
        if refused := next((found for state in self.states if (found := obeyed.refusal(state))), None):
            return refused
        # Newest pods first: their trouble is what the user just caused.
        for pod in (*self.current, *self.old):
            if pod.failure:
                return pod.failure
        for state in self.states:
            if state.engine and state.engine.phase == "failed":
                return failure("EngineFailed", state.engine.failure or "the engine failed", state.pod.name)
        # Pods that are gone explain what is missing; once nothing is, they are history.
        return next((pod.failure for pod in self.ended if pod.failure), None) if not self._complete() else None

    def _complete(self) -> bool:
        return self.settled and len(self.ready_current) >= self.wanted

    def _ready(self) -> Claim:
        if self.problem:
            return Claim(status="False", reason=self.problem.reason, message=self.problem.message)
        if self.wanted == 0:
            return Claim(status="False", reason="ScaledToZero", message="No replicas are wanted.")
        if not self._complete():
            reason, message = self._waiting_for()
            return Claim(status="False", reason=reason, message=message)
        feasible = self._slo_feasible()
        if feasible.status == "False" and self.spec and self.spec.live.slo.enforcement == "Enforce":
            return Claim(status="False", reason=feasible.reason, message=feasible.message)
        return Claim(status="True", reason="Serving", message=f"All {self._of_wanted()} replicas serve.")

    def _of_wanted(self) -> str:
        return f"{len(self.ready_current)} of {self.wanted}"

    def _waiting_for(self) -> tuple[str, str]:
        """Why not all replicas of the current revision serve yet."""
        count = f"{self._of_wanted()} replicas of the current revision serve"
        if self.failure:
            where = f" on pod {self.failure.pod}" if self.failure.pod else ""
            return self.failure.reason, f"{count}; {self.failure.reason}{where}: {self.failure.message}"
        if not self.settled:
            return "Applying", "The current revision is being handed to its Deployment."
        if loading := self._loading():
            return "ModelLoading", f"{count}; {loading}."
        if self.waits_for_drain:
            return "WaitingForDrain", f"{count}; pods on their way out end their streams first ({self.leaving})."
        if any(pod.is_ready for pod in self.old):
            return "RollingOut", f"{count}; {len(self.old)} of an older one still do."
        return "PodsStarting", f"{count}; pods are starting."

    def _loading(self) -> str:
        """What the least advanced loading pod says."""
        for state in self.states:
            engine = state.engine
            if engine and engine.phase == "loading":
                return f"pod {state.pod.name} is loading the model{progress(engine.loading)}"
        return ""

    def _available(self) -> Claim:
        if self.ready:
            return Claim(status="True", reason="Serving", message=f"{len(self.ready)} pods take requests.")
        if self.spec and self.wanted == 0:
            return Claim(status="False", reason="ScaledToZero", message="No replicas are wanted.")
        reason = self.failure.reason if self.failure else self._waiting_for()[0]
        return Claim(status="False", reason=reason, message="No pod takes requests.")

    def _progressing(self) -> Claim:
        if self.problem:
            return Claim(status="False", reason=self.problem.reason, message=self.problem.message)
        if self._complete() and self.pending:
            return self._pending()
        if self._complete() and not self.old and len(self.current) == self.wanted:
            return Claim(status="False", reason="Settled", message="Every pod is of the current revision.")
        if self.failure and not self._complete():
            return Claim(status="False", reason=self.failure.reason, message=f"It cannot go on: {self.failure.message}")
        if self._complete():
            text = f"{len(self.pods) - self.wanted} pods that are not wanted any more still run."
            return Claim(status="True", reason="RollingOut", message=text)
        reason, message = self._waiting_for()
        return Claim(status="True", reason=reason, message=message)

    def _pending(self) -> Claim:
        """What is said while pods that serve go by an older `live.json`."""
        if self.failure and self.failure.reason == obeyed.REFUSED:
            return Claim(status="False", reason=obeyed.REFUSED, message=f"It cannot go on: {self.failure.message}")
        text = f"{self.pending} of {len(self.current)} pods have not taken the changed promise or admission yet"
        return Claim(status="True", reason=obeyed.PENDING, message=f"{text}; a kubelet hands it on within minutes.")

    def _model_loaded(self) -> Claim:
        among = self.current or self.old
        if not among:
            return Claim(status="Unknown", reason="NoPods", message="There is no pod that could load it.")
        loading = self._loading()
        if not loading and all(pod.is_ready for pod in among):
            return Claim(status="True", reason="Loaded", message="Every pod has loaded the model.")
        failing = next((pod.failure for pod in among if pod.failure), None)
        if failing:
            return Claim(status="False", reason=failing.reason, message=failing.message)
        if loading:
            return Claim(status="False", reason="ModelLoading", message=f"{loading[0].upper()}{loading[1:]}.")
        states = {state.pod.name: state for state in self.states}
        if all((state := states.get(pod.name)) and state.engine and state.engine.phase == "ready" for pod in among):
            return Claim(status="True", reason="Loaded", message="Every pod has loaded the model.")
        return Claim(status="Unknown", reason="PodsStarting", message="A pod has not said yet how far it is.")

    def _admission_open(self) -> Claim:
        doors = [state.gate for state in self.states if state.pod.is_ready]
        if doors and all(door.api_keys == 0 for door in doors):
            text = "No API key is in force, so nobody is let in: the Secret of admission.apiKeysSecretRef has none."
            return Claim(status="False", reason="NoApiKeys", message=text)
        if not self.ready:
            return Claim(status="False", reason="NothingServes", message="No pod takes requests.")
        if not doors:
            return Claim(status="Unknown", reason="NotObserved", message="No ready pod's gate could be asked.")
        if any(door.admission.open for door in doors):
            return Claim(status="True", reason="Open", message="One more small request would be let in.")
        codes = sorted({door.admission.reason for door in doors if door.admission.reason})
        text = f"Every pod is busy ({', '.join(codes) or 'no reason given'}); clients are told when to come back."
        return Claim(status="False", reason="Busy", message=text)

    def _slo_feasible(self) -> Claim:
        for state in self.judged:
            limits = state.engine.derived if state.engine else None
            if limits and not limits.feasible:
                text = f"Pod {state.pod.name}: {limits.reason}." if limits.reason else "The promise cannot be kept."
                return Claim(status="False", reason="PromiseInfeasible", message=text)
        if not self.judged:
            return Claim(status="Unknown", reason="NotMeasured", message="No pod has measured its step times yet.")
        limits_dict = figures.derived(self.judged) or {}
        text = (
            f"A step may carry {limits_dict['chunkCeilingTokens']} prefill tokens beside a decode, "
            f"and {limits_dict['maxSequences']} requests may run at once."
        )
        return Claim(status="True", reason="Feasible", message=text)

    def _slo_met(self) -> Claim:
        seen = [state.gate.measured for state in self.states if state.pod.is_ready]
        total = sum(one.requests for one in seen)
        if not total:
            return Claim(status="Unknown", reason="NoTraffic", message="No request ended in the last five minutes.")
        if self.spec is None:
            reason = self.problem.reason if self.problem else "NotObserved"
            return Claim(status="Unknown", reason=reason, message="The promise that requests are held to is not known.")
        percent = 100 * sum(one.good_requests for one in seen) / total
        target = self.spec.live.slo.target_percent
        kept = f"{percent:.1f} % of {total} requests kept the promise in the last five minutes"
        text = f"{kept}; the target is {target:g} %."
        if percent >= target:
            return Claim(status="True", reason="PromiseKept", message=text)
        return Claim(status="False", reason="PromiseMissed", message=text)

    def _degraded(self) -> Claim:
        if self.failure:
            return Claim(status="True", reason=self.failure.reason, message=self.failure.message)
        return Claim(status="False", reason="AsExpected", message="Nothing stands in the way.")


def _waits_for_room(pod: PodView) -> bool:
    return pod.failure is not None and pod.failure.reason == "Unschedulable"


def is_pollable(pod: PodView) -> bool:
    """Whether the pod's gate can be asked for its state."""
    return pod.is_running and bool(pod.ip)
