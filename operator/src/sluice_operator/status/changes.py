"""What is worth telling besides the status: events for its changes, and failures the operator itself met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_operator.observed.failures import Failure, failure
from sluice_operator.plan import Key
from sluice_operator.status import status

REFUSED_HINT = "Change the field of the spec that the message names, most likely under podTemplate or resources."

# Why a service is not Ready for a while when somebody changed its spec: nothing to be warned of.
_ASKED_FOR = {"Applying", "RollingOut"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event, and how often it was told since the operator started."""

    kind: str
    """Normal or Warning."""
    reason: str
    message: str
    """The newest."""
    first: str
    """When it was told first, as Kubernetes writes times."""
    last: str
    count: int = 1


Series = dict[tuple[str, str], Told]
"""What was told of one service, by kind and reason: no more entries than there are reasons."""


def tell(series: Series, kind: str, reason: str, message: str, now: str) -> Told:
    """The event to send: one more of its kind and reason, not a new one each time."""
    before = series.get((kind, reason))
    first, count = (before.first, before.count + 1) if before else (now, 1)
    told = Told(kind=kind, reason=reason, message=message, first=first, last=now, count=count)
    series[kind, reason] = told
    return told


def transitions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The events (kind, reason, message) that a change of status is worth.

    A new failure, readiness won or lost, a promise that is found infeasible, missed, or kept again; each reason once.
    """
    events: dict[str, tuple[str, str, str]] = {}

    def add(kind: str, reason: str, message: str) -> None:
        events.setdefault(reason, (kind, reason, message))

    found, before = new.get("failure"), old.get("failure", {})
    if found and (found["reason"], found.get("pod")) != (before.get("reason"), before.get("pod")):
        add("Warning", found["reason"], found["message"])
    ready, was = (status.condition(one, "Ready") for one in (new, old))
    if ready.get("status") == "True" and was.get("status") != "True":
        add("Normal", "Ready" if ready["reason"] == "Serving" else ready["reason"], ready["message"])
    elif ready.get("status") == "False" and was.get("status") == "True" and not found:
        add("Normal" if ready["reason"] in _ASKED_FOR else "Warning", ready["reason"], ready["message"])
    for name in ("SLOFeasible", "SLOMet"):
        claim, was = (status.condition(one, name) for one in (new, old))
        if claim.get("status") == "False" and was.get("status") != "False":
            add("Warning", claim["reason"], claim["message"])
        elif claim.get("status") == "True" and was.get("status") == "False":
            add("Normal", claim["reason"], claim["message"])
    return list(events.values())


def not_applied(error: Exception) -> Failure:
    """The failure of a reconcile that the API server, or something behind it, does not let through again and again."""
    return failure("NotApplied", f"what is wanted cannot be applied now: {str(error) or type(error).__name__}")


def name_taken(foreign: Sequence[Key]) -> Failure | None:
    """The failure of needing names that are in use; None when there are none."""
    if not foreign:
        return None
    kind, name = foreign[0]
    return Failure(
        reason="NameTaken",
        message=f"{kind} {name} exists and belongs to something else; it is left alone",
        hint=f"Delete or rename that {kind}, or give the InferenceService another name.",
    )


def is_available(seen: Mapping[str, Any]) -> bool:
    """Whether somebody serves, or nobody is wanted to."""
    found = status.condition(seen, "Available")
    return found.get("status") == "True" or found.get("reason") == "ScaledToZero"


def is_settled(seen: Mapping[str, Any]) -> bool:
    """Whether nothing is left to be rolled out."""
    return status.condition(seen, "Progressing").get("reason") == "Settled"
