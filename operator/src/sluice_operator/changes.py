"""What is worth telling besides the status: events for its changes, and failures the operator itself met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sluice_operator import status
from sluice_operator.failures import Failure
from sluice_operator.plan import Key

REFUSED_HINT = "Change the field of the spec that the message names, most likely under podTemplate or resources."


def transitions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The events (type, reason, message) that a change of status is worth: readiness won or lost, a new failure."""
    events = []
    failure, before = new.get("failure"), old.get("failure", {})
    if failure and (failure["reason"], failure.get("pod")) != (before.get("reason"), before.get("pod")):
        events.append(("Warning", failure["reason"], failure["message"]))
    ready = status.condition(new, "Ready")
    was = status.condition(old, "Ready")
    if ready.get("status") == "True" and was.get("status") != "True":
        events.append(("Normal", "Ready", ready["message"]))
    elif ready.get("status") == "False" and was.get("status") == "True" and not failure:
        events.append(("Warning", ready["reason"], ready["message"]))
    return events


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
