"""Warnings that explain nothing: what every pod brings that loads or leaves, and what a node says of all its pods.

Whatever is not known to be of that kind is told. Pure. Next: `diagnosis.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sluice_operator.observed.moments import last_told, seconds_between
from sluice_operator.status.conditions.view import condition
from sluice_sidecar.telemetry.state import GateState

Object = Mapping[str, Any]

# How a node names servers to its pods: each falls back to what works, and says so of every pod again and again.
_OF_THE_NODE = {"MissingClusterDNS", "DNSConfigForming"}
# A failed liveness probe is not among them: it ends a container.
_NOT_YET = re.compile(r"(Readiness|Startup) probe (failed|errored)")


def explains(event: Object, pod: Object | None, gate: GateState | None) -> bool:
    """Whether a warning may say why; `pod` is the one it is about and `gate` its gate's word, where there are such."""
    if event.get("reason") in _OF_THE_NODE:
        return False
    if event.get("reason") != "Unhealthy" or pod is None:
        return True
    if pod["metadata"].get("deletionTimestamp"):
        return False
    if not _NOT_YET.match(str(event.get("message", ""))):
        return True
    ready = condition(pod.get("status", {}), "Ready")
    if ready.get("status") == "True":
        # It began to serve after it: that is how each pod starts.
        return seconds_between(str(ready.get("lastTransitionTime", "")), last_told(event)) > 0
    is_loading = gate is not None and gate.engine is not None and gate.engine.phase == "loading"
    return not (is_loading or (gate is not None and gate.draining))
