"""SLOFeasible, SLOMet and AdmissionOpen: whether the promise can be kept, is kept, and to whom. Pure."""

from __future__ import annotations

from sluice_operator.status import figures
from sluice_operator.status.claim import Claim
from sluice_operator.status.conditions.view import View

NO_API_KEYS = "NoApiKeys"


def admission_open(view: View) -> Claim:
    """One more request would be let in."""
    doors = [state.gate for state in view.states if state.pod.is_ready]
    if doors and all(door.api_keys == 0 for door in doors):
        # Not Busy's kind: no waiting helps, so `ready` says it as well.
        name = view.spec.api_keys_secret if view.spec else ""
        secret = f"Secret {name} (admission.apiKeysSecretRef)" if name else "Secret of admission.apiKeysSecretRef"
        # A trusted peer vouches for its callers, who need no key then.
        peers = " that no trusted peer names a tenant for" if view.spec and view.spec.trusted_peers else ""
        shut = f"No API key is in force, so every request{peers} is refused with 401"
        text = f"{shut}: the {secret} is missing or has none."
        return Claim(status="False", reason=NO_API_KEYS, message=text)
    if not view.ready:
        return Claim(status="False", reason="NothingServes", message="No pod takes requests.")
    if not doors:
        return Claim(status="Unknown", reason="NotObserved", message="No ready pod's gate could be asked.")
    if any(door.admission.open for door in doors):
        return Claim(status="True", reason="Open", message="One more small request would be let in.")
    codes = sorted({door.admission.reason for door in doors if door.admission.reason})
    if any(door.admission.only_watches for door in doors):
        text = f"Nobody is refused for load (admission.mode: Observe); Enforce would refuse now: {', '.join(codes)}."
        return Claim(status="True", reason="Observing", message=text)
    text = f"Every pod is busy ({', '.join(codes) or 'no reason given'}); clients are told when to come back."
    return Claim(status="False", reason="Busy", message=text)


def slo_feasible(view: View) -> Claim:
    """The hardware can keep the promise."""
    for state in view.judged:
        limits = state.engine.derived if state.engine else None
        if limits and not limits.feasible:
            text = f"Pod {state.pod.name}: {limits.reason}." if limits.reason else "The promise cannot be kept."
            return Claim(status="False", reason="PromiseInfeasible", message=text)
    if not view.judged:
        return Claim(status="Unknown", reason="NotMeasured", message="No pod has measured its step times yet.")
    limits_dict = figures.derived(view.judged) or {}
    text = (
        f"A step may carry {limits_dict['chunkCeilingTokens']} prefill tokens beside a decode, "
        f"and {limits_dict['maxSequences']} requests may run at once."
    )
    return Claim(status="True", reason="Feasible", message=text)


def slo_met(view: View) -> Claim:
    """Clients saw the promise kept in the last five minutes."""
    seen = [state.gate.measured for state in view.states if state.pod.is_ready]
    total = sum(one.requests for one in seen)
    if not total:
        return Claim(status="Unknown", reason="NoTraffic", message="No request ended in the last five minutes.")
    if view.spec is None:
        reason = view.problem.reason if view.problem else "NotObserved"
        return Claim(status="Unknown", reason=reason, message="The promise that requests are held to is not known.")
    percent = 100 * sum(one.good_requests for one in seen) / total
    target = view.spec.live.slo.target_percent
    kept = f"{percent:.1f} % of {total} requests kept the promise in the last five minutes"
    text = f"{kept}; the target is {target:g} %."
    if percent >= target:
        return Claim(status="True", reason="PromiseKept", message=text)
    return Claim(status="False", reason="PromiseMissed", message=text)
