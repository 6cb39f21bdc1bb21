"""What can stand in a service's way: stable reasons, and what to do about each. Pure.

Owns the words only. `containers.py`, `refusals.py`, `kubelet.py` and `pods.py` say which of them holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What stands in the way now."""

    reason: str
    message: str
    hint: str = ""
    pod: str = ""


HINTS = {
    "Unschedulable": "Free or add a node that fits, or change resources, accelerator or podTemplate.",
    "SchedulingGated": "Whoever put the gate on the pod has to take it away: see its spec.schedulingGates.",
    "SchedulerSilent": "See whether kube-scheduler runs, and how much it has to do.",
    "ClaimMissing": "Create the PersistentVolumeClaim in this namespace, or correct its name in the spec.",
    "ClaimUnbound": "See `kubectl describe pvc`: its StorageClass must exist and provision, or a volume must fit it.",
    "ImagePullFailed": "Check runtime.image, that nodes can reach its registry, and podTemplate.imagePullSecrets.",
    "ContainerConfigError": "Correct what the message names, most likely in podTemplate.",
    "SecretMissing": "Create the Secret, or its key, in this namespace, or correct the name in the spec.",
    "ConfigMapMissing": "Create the ConfigMap, or its key, in this namespace, or correct the name in podTemplate.",
    "VolumeFailed": "See `kubectl describe pod`: the volume's driver, its permissions and the node say the rest.",
    "SandboxFailed": "Look at the node's network plugin and container runtime; another node may do.",
    "OutOfMemory": "Raise resources.limits.memory, or lower cache.capacity, memoryPercent or hostSwapCapacity.",
    "DeviceOutOfMemory": "Lower cache.memoryPercent or model.maxLengthTokens, or choose a larger device.",
    "ModelMissing": "Check spec.model.source: the path must exist in the image or on a volume mounted into the engine.",
    "ModelCorrupt": "Copy the model's files again, or choose another source.",
    "ModelUnsupported": "Choose a model of a supported family (docs/models.md lists them), or another dataType.",
    "AdapterRefused": "Correct the adapter that the message names, or take it out of spec.model.adapters.",
    "ModelAccessDenied": "Accept the model's terms on the hub, and name a token of that account in tokenSecretRef.",
    "ModelCacheUnusable": "Check the volume that model.source.huggingFace.cacheVolume names: pods write as user 65532.",
    "HubUnreachable": "Check podTemplate.engine.env: HF_ENDPOINT, HTTPS_PROXY, SSL_CERT_FILE; or the way to the hub.",
    "DiskFull": "Free space on the node or on the volume that the message names.",
    "SocketInUse": "Delete the pod. If it comes back, look for what podTemplate runs beside the engine.",
    "SocketUnavailable": "Delete the pod. If it comes back, look at the node: /run/sluice lies in its memory.",
    "PortInUse": "Look for something in the pod that listens on 8080 or 9090; the gate needs both.",
    "ConfigRefused": "Mend the Secret of API keys, or install operator, gate and engine images of one version.",
    "InvalidConfig": "Install operator, gate and engine images of one version.",
    "ProbeFailed": "See `kubectl logs --previous` of that container: it ran and did not answer in time.",
    "EngineKilled": "If nobody did that, see `kubectl logs --previous -c engine` and the node's kernel log.",
    "EngineHung": "The liveness probe restarts the engine. If it repeats, look at the device's health.",
    "RankFailed": "`kubectl logs --previous -c engine` has the rest; if it repeats, look at the devices' health.",
    "EngineFailed": "`kubectl logs POD -c engine` has the rest; add `--previous` where it has restarted.",
    "CrashLoop": "See `kubectl logs --previous -c engine`.",
    "QuotaExceeded": "Raise the ResourceQuota, free what it counts, or set resources within it.",
    "PolicyRefused": "Change what the policy names, most likely in podTemplate, or have the policy let it pass.",
    "ServiceAccountMissing": "Create the ServiceAccount that podTemplate.serviceAccountName names.",
    "PodsRefused": "Change what the message names: a limit range, a class, or a field of the spec.",
    "NotApplied": "The operator tries again by itself; the message names what is in its way, such as a webhook.",
    "PodFailed": "See `kubectl describe pod` for what ended it.",
    "NodeRefused": "The node had no room after all; another pod is made. If it repeats, restart its device plugin.",
    "NodeUnreachable": "See `kubectl get nodes`; after five minutes Kubernetes makes the pod anew elsewhere.",
    "Evicted": "Raise resources.requests, or free memory or disk on the node.",
}

# No waiting helps: somebody has to change the spec, or what it names.
_NEEDS_AN_EDIT = {
    "InvalidSpec", "NameTaken", "PolicyRefused", "ServiceAccountMissing", "PodsRefused", "ContainerConfigError",
    "ModelMissing", "ModelCorrupt", "ModelUnsupported", "AdapterRefused", "InvalidConfig", "ConfigRefused",
    "OutOfMemory", "DeviceOutOfMemory", "PromiseInfeasible",
}  # fmt: skip

# The engine's own code says only that memory did not do; these words say that it was the device's.
_DEVICE = re.compile(r"CUDA|HIP|cuda|device memory")
_PULL_HINTS = (
    (
        re.compile(r"unauthori[sz]ed|authorization|forbidden|denied|authentication|\b40[13]\b", re.IGNORECASE),
        "Name a Secret with the registry's credentials in podTemplate.imagePullSecrets, and check the image's name.",
    ),
    (
        re.compile(r"not found|manifest unknown|not present|InvalidImageName|couldn't parse", re.IGNORECASE),
        "Correct the name or tag of the image: runtime.image, or images.* of the chart.",
    ),
    (
        re.compile(r"no such host|timeout|refused|unreachable|lookup", re.IGNORECASE),
        "The node cannot reach the registry: check its name, the network and proxies.",
    ),
)


# The gate's own code says only that it refused what it was given; these words say that it was the keys.
_KEYS = re.compile(r"\bapi keys: ")
_KEYS_HINT = (
    "Mend the Secret that admission.apiKeysSecretRef names; the pod starts again by itself, within five minutes."
)


def needs_an_edit(reason: str) -> bool:
    """Whether what a reason names stays until somebody changes the spec or what it names."""
    # `DeploymentRefused` and the like: the API server's verdict on an object of ours.
    return reason in _NEEDS_AN_EDIT or (reason.endswith("Refused") and reason != "NodeRefused")


def failure(reason: str, message: str, pod: str = "") -> Failure:
    """A failure with the hint of its reason; the reason is made more exact where the message allows it."""
    if reason == "OutOfMemory" and _DEVICE.search(message):
        reason = "DeviceOutOfMemory"
    hint = HINTS.get(reason, "")
    if reason == "ImagePullFailed":
        hint = next((better for words, better in _PULL_HINTS if words.search(message)), hint)
    elif reason == "InvalidConfig" and _KEYS.search(message):
        hint = _KEYS_HINT
    return Failure(reason=reason, message=message, hint=hint, pod=pod)
