"""What the kubelet tells by events alone: mounts, sandboxes and probes that fail. Pure.

Events outlive what they tell of: each is taken only while nothing that came after contradicts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice_operator.observed import containers
from sluice_operator.observed.failures import Failure, failure
from sluice_operator.observed.moments import last_told

Object = Mapping[str, Any]

_MISHAPS = {
    "FailedMount": "VolumeFailed",
    "FailedAttachVolume": "VolumeFailed",
    "FailedMapVolume": "VolumeFailed",
    "FailedCreatePodSandBox": "SandboxFailed",
    "NetworkNotReady": "SandboxFailed",
}
# These come only after all volumes are mounted and the sandbox is made.
_BEYOND = {"Pulling", "Pulled", "Created", "Started", "BackOff", "Failed"}
_KILLED_BY_PROBE = re.compile(r"[Cc]ontainer (\S+) failed (startup|liveness) probe")
_NO_CREDENTIALS = "FailedToRetrieveImagePullSecret"


def waiting_failure(events: Sequence[Object], pod: str) -> Failure | None:
    """What keeps the containers of a pod from being made; None where the kubelet got past it, or never said."""
    newest = ""
    for event in _newest_first(events):
        reason, message = event.get("reason", ""), event.get("message", "")
        if reason in _BEYOND:
            break
        if reason in _MISHAPS:
            told = containers.missing_object(message) or _MISHAPS[reason]
            # The kubelet's "timed out waiting for the condition" names no cause; an event before it does.
            if "timed out waiting" not in message:
                return failure(told, message, pod)
            newest = newest or message
    return failure("VolumeFailed", newest, pod) if newest else None


def probe_failure(container: Object, events: Sequence[Object], pod: str) -> Failure | None:
    """The probe for which the container's last run was ended; None where it ended for another cause."""
    name = container["name"]
    began, ended = containers.last_run(container)
    for event in _newest_first(events):
        match = _KILLED_BY_PROBE.search(event.get("message", ""))
        if event.get("reason") == "Killing" and match and match[1] == name and began <= _time(event) <= ended:
            probe = match[2]
            said = next(_unhealthy(events, probe), "")
            text = f"{name}: its {probe} probe failed, and it was restarted" + (f" ({said})" if said else "")
            return failure("ProbeFailed", text, pod)
    return None


def missing_credentials(events: Sequence[Object]) -> str:
    """What the kubelet says of pull Secrets that it does not find; empty where it says nothing."""
    found = (event for event in _newest_first(events) if event.get("reason") == _NO_CREDENTIALS)
    return next((str(event.get("message", "")) for event in found), "")


def _unhealthy(events: Sequence[Object], probe: str) -> Iterator[str]:
    start = f"{probe.capitalize()} probe failed: "
    for event in _newest_first(events):
        message = str(event.get("message", ""))
        if event.get("reason") == "Unhealthy" and message.startswith(start):
            yield message.removeprefix(start).strip()


def _newest_first(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=lambda event: (_time(event), _order(event)), reverse=True)


def _time(event: Object) -> str:
    # To the second, as a container's times are written; eventTime has more digits.
    return re.sub(r"\.\d+", "", last_told(event))


def _order(event: Object) -> int:
    # Many events fall into one second; the version says which came later.
    version = str(event.get("metadata", {}).get("resourceVersion", ""))
    return int(version) if version.isdigit() else 0
