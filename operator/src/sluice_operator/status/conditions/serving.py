"""Ready, Available and Progressing: who serves, and whether anything is still to come. Pure."""

from __future__ import annotations

from sluice_operator.observed import obeyed
from sluice_operator.status.claim import Claim
from sluice_operator.status.conditions.promise import NO_API_KEYS, admission_open, slo_feasible
from sluice_operator.status.conditions.view import View


def ready(view: View) -> Claim:
    """All wanted replicas of the current revision serve, within the promise where it is enforced."""
    if view.problem:
        return Claim(status="False", reason=view.problem.reason, message=view.problem.message)
    if view.wanted == 0:
        # All of none serve, so nobody need wait any longer; Available says that nothing serves.
        if not view.settled:
            return Claim(status="False", reason="Applying", message=view.waiting_for()[1])
        return Claim(status="True", reason="ScaledToZero", message="No replicas are wanted.")
    if not view.is_complete:
        reason, message = view.waiting_for()
        return Claim(status="False", reason=reason, message=message)
    feasible = slo_feasible(view)
    if feasible.status == "False" and view.spec and view.spec.live.slo.enforcement == "Enforce":
        return Claim(status="False", reason=feasible.reason, message=feasible.message)
    door = admission_open(view)
    in_vain = f" {door.message}" if door.reason == NO_API_KEYS else ""
    return Claim(status="True", reason="Serving", message=f"{view.of_wanted} replicas serve.{in_vain}")


def available(view: View) -> Claim:
    """Something serves."""
    if view.ready:
        text = "1 pod takes requests." if len(view.ready) == 1 else f"{len(view.ready)} pods take requests."
        return Claim(status="True", reason="Serving", message=text)
    if view.spec and view.wanted == 0:
        return Claim(status="False", reason="ScaledToZero", message="No replicas are wanted.")
    reason = view.failure.reason if view.failure else view.waiting_for()[0]
    return Claim(status="False", reason=reason, message="No pod takes requests.")


def progressing(view: View) -> Claim:
    """Something is still to come."""
    if view.problem:
        return Claim(status="False", reason=view.problem.reason, message=view.problem.message)
    if view.is_complete and view.pending:
        return _pending(view)
    if view.is_complete and not view.old and len(view.current) == view.wanted:
        return Claim(status="False", reason="Settled", message=f"Every pod is of the current revision.{_newer(view)}")
    if view.failure and not view.is_complete:
        return Claim(status="False", reason=view.failure.reason, message=f"It cannot go on: {view.failure.message}")
    if view.is_complete:
        text = f"{len(view.pods) - view.wanted} pods that are not wanted any more still run."
        return Claim(status="True", reason="RollingOut", message=text)
    reason, message = view.waiting_for()
    return Claim(status="True", reason=reason, message=message)


def _newer(view: View) -> str:
    """What is said of a newer pod template that waits to be taken."""
    runtime = view.runtime
    if runtime is None or not runtime.newer:
        return ""
    waiting = f"; until then pods ignore {', '.join(runtime.waiting)}" if runtime.waiting else ""
    how = f"set spec.runtime.version to {runtime.newer} to take it, which restarts them"
    return f" They run the template of {runtime.version}; the operator has a newer one: {how}{waiting}."


def _pending(view: View) -> Claim:
    """What is said while pods that serve go by an older `live.json`."""
    if view.failure and view.failure.reason == obeyed.REFUSED:
        return Claim(status="False", reason=obeyed.REFUSED, message=f"It cannot go on: {view.failure.message}")
    text = f"{view.pending} of {len(view.current)} pods have not taken the changed promise or admission yet"
    return Claim(status="True", reason=obeyed.PENDING, message=f"{text}; a kubelet hands it on within minutes.")
