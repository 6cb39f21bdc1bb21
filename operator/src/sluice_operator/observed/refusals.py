"""Why the cluster makes no pods, or no node takes them: quotas, policies, what the scheduler says. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sluice_operator.observed.failures import Failure, failure
from sluice_operator.plan import Observed

# In the words of the admission plugins of the API server.
_REFUSED = (
    ("QuotaExceeded", re.compile(r"exceeded quota|failed quota")),
    (
        "PolicyRefused",
        re.compile(r"violates PodSecurity|ValidatingAdmissionPolicy|admission webhook|denied the request"),
    ),
    ("ServiceAccountMissing", re.compile(r"error looking up service account|serviceaccount \"[^\"]*\" not found")),
)
# In the scheduler's words.
_CLAIMS = (
    ("ClaimMissing", re.compile(r'persistentvolumeclaim "[^"]*" (not found|is being deleted)')),
    ("ClaimUnbound", re.compile(r"unbound immediate PersistentVolumeClaims|available persistent volumes to bind")),
    ("ClaimUnbound", re.compile(r"non-existent persistentvolume|binding volumes")),
)


def of_pods(observed: Observed, deployment: Mapping[str, Any] | None) -> Failure | None:
    """Why no pods can be made: a quota, a policy, a field that only pod validation refuses; None where they can."""
    for item in (*observed.replica_sets, *([deployment] if deployment else [])):
        for condition in item.get("status", {}).get("conditions") or ():
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                message = condition.get("message", "")
                return failure(_first(_REFUSED, message) or "PodsRefused", message)
    return None


def of_scheduler(condition: Mapping[str, Any], pod: str) -> Failure:
    """Why the scheduler finds no node, in its own words; `condition` is the pod's PodScheduled, False."""
    message = condition.get("message", "")
    if condition.get("reason") == "SchedulingGated":
        return failure("SchedulingGated", message or "a scheduling gate holds the pod", pod)
    return failure(_first(_CLAIMS, message) or "Unschedulable", message, pod)


def of_a_silent_scheduler(claims: Sequence[str], pod: str) -> Failure:
    """What it means that no scheduler decides about a pod for long: volumes that are being made, or no scheduler."""
    if claims:
        text = f"the scheduler waits for a volume of {', '.join(claims)}, which is being made"
        return failure("ClaimUnbound", text, pod)
    return failure("SchedulerSilent", "no scheduler has said anything of the pod", pod)


def _first(table: tuple[tuple[str, re.Pattern[str]], ...], message: str) -> str | None:
    return next((reason for reason, words in table if words.search(message)), None)
