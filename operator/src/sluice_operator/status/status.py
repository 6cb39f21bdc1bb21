"""The status of an InferenceService, from what is observed now.

Owns the conditions: every one carries the generation it speaks of, a stable reason and a sentence, and its
lastTransitionTime moves only with its status. Nothing sticks: a claim that is no longer seen to hold is no longer made.
Pure. Before: `pods.py`, `figures.py`; what each condition claims: `conditions/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_operator.observed.pods import PodView
from sluice_operator.rendering import labels, render
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status import figures
from sluice_operator.status.claim import Claim
from sluice_operator.status.conditions.around import autoscaling, monitoring_ready
from sluice_operator.status.conditions.model import degraded, model_loaded
from sluice_operator.status.conditions.promise import admission_open, slo_feasible, slo_met
from sluice_operator.status.conditions.serving import available, progressing, ready
from sluice_operator.status.conditions.tools import for_tools
from sluice_operator.status.conditions.view import View, condition
from sluice_operator.status.situation import Situation

__all__ = ["Situation", "compute", "condition", "is_pollable"]

Json = dict[str, Any]

_MESSAGE_LIMIT = 2048  # as the CRD has it


def compute(situation: Situation, previous: Mapping[str, Any], now: str) -> Json:
    """The whole status; `previous` is the one in the resource, `now` the time as Kubernetes writes it."""
    view = View(situation, previous, now)
    claims = _claims(view)
    status: Json = {
        "observedGeneration": situation.generation,
        "conditions": _dated(claims, previous.get("conditions", ()), situation.generation, now),
        "replicas": len(view.pods),
        "readyReplicas": len(view.ready),
    }
    if runtime := situation.runtime:
        status["runtime"] = {"version": runtime.version, **({"newer": runtime.newer} if runtime.newer else {})}
    else:
        status["runtime"] = previous.get("runtime")
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


def _step_cost(spec: ServiceSpec, view: View, previous: Mapping[str, Any]) -> Json | None:
    basis = _basis(spec, view)
    on_basis = [state for state in view.states if state.pod.cost_basis == basis]
    # A cost measured on other hardware says nothing; it is forgotten once only such pods are left.
    stale = any(pod.is_ready for pod in view.pods) and not any(pod.cost_basis == basis for pod in view.pods)
    published = None if stale else previous.get("stepCost")
    return figures.step_cost(on_basis, spec.live.slo.inter_token_latency_us, published)


def _basis(spec: ServiceSpec, view: View) -> str:
    """What pods of the newest revision say their cost was measured on: a newer release may name the same otherwise."""
    template: Mapping[str, Any] = ((view.deployment or {}).get("spec") or {}).get("template") or {}
    annotations = template.get("metadata", {}).get("annotations", {})
    basis: str = annotations.get(labels.COST_BASIS_ANNOTATION) or labels.cost_basis(spec)
    return basis


def _dated(claims: Mapping[str, Claim], previous: Any, generation: int, now: str) -> list[Json]:  # noqa: ANN401  # JSON
    before = {one["type"]: one for one in previous}
    dated = []
    for kind, claim in claims.items():
        old = before.get(kind)
        since = old.get("lastTransitionTime") if old is not None and old.get("status") == claim.status else None
        dated.append(
            {
                "type": kind,
                "status": claim.status,
                "observedGeneration": generation,
                "reason": claim.reason,
                "message": claim.message[:_MESSAGE_LIMIT],
                "lastTransitionTime": since or now,
            }
        )
    return dated


def _claims(view: View) -> dict[str, Claim]:
    """All conditions, in the order in which they are read."""
    scaling = autoscaling(view.spec, view.kinds, view.scaled)
    claims = {
        "Ready": ready(view),
        "Available": available(view),
        "Progressing": progressing(view),
        "ModelLoaded": model_loaded(view),
        "AdmissionOpen": admission_open(view),
        "SLOFeasible": slo_feasible(view),
        "SLOMet": slo_met(view),
        "MonitoringReady": monitoring_ready(view.spec, view.kinds),
        **({"Autoscaling": scaling} if scaling else {}),
        "Degraded": degraded(view),
    }
    return claims | for_tools(view, claims)


def is_pollable(pod: PodView) -> bool:
    """Whether the pod's gate can be asked for its state."""
    return pod.is_running and bool(pod.ip)
