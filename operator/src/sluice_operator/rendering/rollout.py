"""Which way the pods are being replaced: the new one beside the old one, or the old one first.

Owns the strategy Auto: surge, and in place once there has been no room beside the old pods for a while. All follows
from what is observed now; the Deployment itself remembers which way it goes. Pure. Next: `render.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_operator.observed import pods
from sluice_operator.observed.moments import seconds_between
from sluice_operator.observed.pods import PodView
from sluice_operator.plan import Observed
from sluice_operator.rendering.pod_template import Object

SURGE, IN_PLACE, AUTO = "Surge", "InPlace", "Auto"

# A device plugin that registers anew, a node that joins or a pod of somebody else that ends takes less than that.
PATIENCE_S = 60.0

_QUOTA = re.compile(r"exceeded quota|failed quota")
_NODES = re.compile(r"preemption: 0/(\d+) nodes")
_HELPLESS = re.compile(r"(\d+) Preemption is not helpful")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the pods are replaced from now on."""

    strategy: str
    """Surge or InPlace."""
    recheck_s: float | None = None
    """When to decide again though nothing happens; None: by events alone."""


def way(strategy: str, observed: Observed, *, now: str, quiet_s: float) -> Way:
    """The way for the strategy that the spec names.

    `now` is the time as Kubernetes writes it. For `quiet_s` no pod of the service has been on its way out: what such a
    pod holds will be free.
    """
    if strategy == IN_PLACE:
        return Way(strategy=IN_PLACE)
    deployment = next((one for one in observed.owned.values() if one["kind"] == "Deployment"), None)
    current = SURGE if strategy == SURGE else goes(deployment)
    if not pods.rollout_is_observed(deployment):
        return Way(strategy=current)  # what is newest is not known yet
    old = [pod for pod in pods.views(observed) if not pod.is_current]
    if current == IN_PLACE and (old or pods.leaving(observed)):
        return Way(strategy=IN_PLACE)  # to the end: room that came and went would only make it dither
    left_s = _patience_left_s(strategy, observed, old, now=now, quiet_s=quiet_s)
    if left_s is None or left_s > 0:
        return Way(strategy=SURGE, recheck_s=left_s)
    return Way(strategy=IN_PLACE)


def _patience_left_s(
    strategy: str, observed: Observed, old: Sequence[PodView], *, now: str, quiet_s: float
) -> float | None:
    """How long room beside the old pods is still waited for; None: for ever, or nobody needs any."""
    stuck_s = _stuck_s(observed, now)
    if not old or stuck_s is None:
        return None
    if any(pod.failure and not pod.is_ready for pod in old):
        return 0  # a pod that does not serve is no reason to wait for room beside it
    return None if strategy == SURGE else max(0, PATIENCE_S - min(stuck_s, quiet_s))


def goes(deployment: Object | None) -> str:
    """Which way the Deployment goes now."""
    if deployment is None:
        return SURGE
    rolling = deployment["spec"].get("strategy", {}).get("rollingUpdate") or {}
    return IN_PLACE if rolling.get("maxSurge") == 0 else SURGE


def _stuck_s(observed: Observed, now: str) -> float | None:
    """For how long there has been no room for a pod of the newest revision; None: there is."""
    waits = [seconds_between(since, now) for since in _stuck_since(observed)]
    return max(waits, default=None)


def _stuck_since(observed: Observed) -> Iterator[str]:
    newest = pods.newest_revision(observed.replica_sets)
    for pod in observed.pods:
        if pods.revision_of(pod) != newest or pod["metadata"].get("deletionTimestamp"):
            continue
        for condition in _conditions(pod):
            is_stuck = condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
            if is_stuck and condition["status"] == "False" and _would_help(condition.get("message", "")):
                yield condition.get("lastTransitionTime", "")
    for replica_set in observed.replica_sets:
        if pods.revision_of(replica_set) != newest:
            continue
        for condition in _conditions(replica_set):
            is_stuck = condition["type"] == "ReplicaFailure" and condition["status"] == "True"
            if is_stuck and _QUOTA.search(condition.get("message", "")):
                yield condition.get("lastTransitionTime", "")


def _would_help(message: str) -> bool:
    """Whether the room of another pod could help: the scheduler says on how many nodes evicting somebody could not.

    A selector that no node matches would only cost the old pod as well.
    """
    nodes, helpless = _NODES.search(message), _HELPLESS.search(message)
    return not (nodes and helpless and nodes[1] == helpless[1])


def _conditions(item: Object) -> Iterator[Mapping[str, Any]]:
    yield from item.get("status", {}).get("conditions") or ()
