"""What a container's status says about what stands in its way, in plain words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sluice_operator.observed.failures import HINTS, Failure, failure

Status = Mapping[str, Any]

# `CODE: message`, the last line of a program that could not start or go on.
_LAST_WORDS = re.compile(r"^([A-Z][A-Za-z]{3,40}): (.+)")
_IMAGE_REASONS = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_CONFIG_REASONS = {
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError",
    "PreStartHookError", "PostStartHookError",
}  # fmt: skip
_KILLED = 137  # 128 + SIGKILL
_BAD_INPUT = 2
# How a container ends when its probe failed: by SIGKILL, by SIGTERM, or in good order after SIGTERM.
_ENDS_OF_A_PROBE = {0, _KILLED, 143}

_MISSING = (
    ("SecretMissing", re.compile(r'\bsecret "[^"]+" not found|in Secret |secret key:', re.IGNORECASE)),
    ("ConfigMapMissing", re.compile(r'\bconfigmap "[^"]+" not found|in ConfigMap |config key:', re.IGNORECASE)),
)

# Programs that are not ours say what it was somewhere in the end of their log. The last line of vLLM's, for one, is
# "Engine core initialization failed. See root cause above."
_FOREIGN_WORDS = (
    ("DeviceOutOfMemory", re.compile(r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks")),
    ("DeviceOutOfMemory", re.compile(r"larger than the available KV cache memory|failed to allocate CUDA")),
    ("ModelMissing", re.compile(r"is not a local folder|Repository Not Found|RepositoryNotFoundError")),
    ("DiskFull", re.compile(r"No space left on device")),
)


def missing_object(message: str) -> str | None:
    """SecretMissing or ConfigMapMissing where a message of the kubelet names one; else None."""
    return next((reason for reason, words in _MISSING if words.search(message)), None)


def container_failure(container: Status, pod: str) -> Failure | None:
    """What stands in the way of one container now; None where nothing does."""
    name, state = container["name"], container.get("state", {})
    waiting = state.get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return failure("ImagePullFailed", f"{name}: {message or reason}", pod)
    if reason in _CONFIG_REASONS:
        told = missing_object(message) or "ContainerConfigError"
        return failure(told, f"{name}: {message or reason}", pod)
    ended = _end(container)
    return ended_failure(name, ended, pod, is_repeated=reason == "CrashLoopBackOff") if ended else None


def ended_failure(name: str, ended: Status, pod: str, *, is_repeated: bool = False) -> Failure | None:
    """Why a container ended; None for a good end that is not repeated."""
    code, reason = ended.get("exitCode", 0), ended.get("reason", "")
    # A termination message, or the end of the log.
    said = (ended.get("message") or "").strip()
    final = (said.splitlines() or [""])[-1]
    words = f": {final}" if final else ""
    if code == 0 and not is_repeated:
        return None
    if reason == "OOMKilled":
        told, text = "OutOfMemory", f"{name} used more memory than its limit and was killed"
    elif (match := _LAST_WORDS.match(final)) and match[1] in HINTS:
        told, text = match[1], f"{name}: {match[2]}"
    elif code == _KILLED:
        told, text = "EngineKilled" if name == "engine" else "CrashLoop", f"{name} was killed (exit code 137)"
    elif reason in {"ContainerCannotRun", "StartError"}:
        told, text = "ContainerConfigError", f"{name}: {final or reason}"
    elif code == 0:
        told, text = "CrashLoop", f"{name} ends again and again with exit code 0, and is meant to run on{words}"
    elif found := _foreign_words(said):
        told, text = found[0], f"{name}: {found[1]}"
    else:
        told = "InvalidConfig" if code == _BAD_INPUT else "CrashLoop"
        text = f"{name} ended with exit code {code}{words}"
    return failure(told, text, pod)


def _foreign_words(said: str) -> tuple[str, str] | None:
    """Reason and line of the first cause that is known in the end of a log."""
    lines = ((told, pattern, line.strip()) for told, pattern in _FOREIGN_WORDS for line in said.splitlines())
    return next(((told, line) for told, pattern, line in lines if pattern.search(line)), None)


def may_have_failed_a_probe(container: Status) -> bool:
    """Whether its last end looks like one that follows a failed probe; the container's status does not say."""
    ended = _end(container)
    return ended is not None and ended.get("reason") != "OOMKilled" and ended.get("exitCode") in _ENDS_OF_A_PROBE


def last_run(container: Status) -> tuple[str, str]:
    """When the run that ended last began and ended, as Kubernetes writes times."""
    ended = _end(container) or {}
    return ended.get("startedAt") or "", ended.get("finishedAt") or ""


def _end(container: Status) -> Status | None:
    ended: Status | None = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    return ended
