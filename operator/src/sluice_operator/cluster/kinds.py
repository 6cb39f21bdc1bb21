"""The kinds of objects that the operator reads or writes: where the API server serves each, and what may be done to it.

Owns the table; the chart's role grants exactly its verbs. An optional kind is one whose definition a cluster may lack:
it is rendered, observed and deleted only where discovery found it. To add an object that `render.py` returns, add its
kind here and in the chart's rules. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_READ = frozenset({"list", "watch"})
_KEPT = _READ | {"create", "patch"}
_DELETED = _KEPT | {"delete"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    verbs: frozenset[str]
    """What the operator does to it: `list` and `watch` by our labels; `list` by name to see whose that is.

    Server-side apply needs `create` and `patch`; `delete` is for what is not wanted any more.
    """
    is_optional: bool = False
    is_read: bool = False
    """More of it than its metadata decides or is told; of all others, nothing else is kept."""

    @property
    def api_version(self) -> str:
        """As objects name it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """The path below which the API server serves it."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


SERVICE_KIND = "InferenceService"

KINDS: Mapping[str, Kind] = {
    SERVICE_KIND: Kind(group="sluice.dev", version="v1alpha1", plural="inferenceservices", verbs=_READ),
    "ServiceAccount": Kind(group="", version="v1", plural="serviceaccounts", verbs=_DELETED),
    "ConfigMap": Kind(group="", version="v1", plural="configmaps", verbs=_DELETED, is_read=True),
    "Service": Kind(group="", version="v1", plural="services", verbs=_KEPT),
    "ControllerRevision": Kind(group="apps", version="v1", plural="controllerrevisions", verbs=_DELETED, is_read=True),
    "Deployment": Kind(group="apps", version="v1", plural="deployments", verbs=_KEPT, is_read=True),
    "PodDisruptionBudget": Kind(group="policy", version="v1", plural="poddisruptionbudgets", verbs=_KEPT),
    "NetworkPolicy": Kind(group="networking.k8s.io", version="v1", plural="networkpolicies", verbs=_DELETED),
    "PodMonitor": Kind(
        group="monitoring.coreos.com", version="v1", plural="podmonitors", verbs=_DELETED, is_optional=True
    ),
    "ScaledObject": Kind(
        group="keda.sh", version="v1alpha1", plural="scaledobjects", verbs=_DELETED, is_optional=True, is_read=True
    ),
    "ReplicaSet": Kind(group="apps", version="v1", plural="replicasets", verbs=_READ, is_read=True),
    "Pod": Kind(group="", version="v1", plural="pods", verbs=_READ, is_read=True),
}

OWNED_KINDS = tuple(name for name, kind in KINDS.items() if "patch" in kind.verbs)
"""What a service's objects may be."""
CHILD_KINDS = tuple(name for name in KINDS if name != SERVICE_KIND)
"""What is watched by our label: what we own, and what the cluster makes of it."""
OPTIONAL_KINDS = tuple(name for name, kind in KINDS.items() if kind.is_optional)

RIGHTS: Mapping[tuple[str, str], frozenset[str]] = {
    **{(kind.group, kind.plural): kind.verbs for kind in KINDS.values()},
    ("sluice.dev", "inferenceservices/status"): frozenset({"patch"}),
    ("", "events"): frozenset({"create", "list", "patch"}),
}
"""Verbs by group and resource that the operator needs where InferenceServices live. Discovery is everybody's right."""

LEASE_RIGHTS: Mapping[tuple[str, str], frozenset[str]] = {
    ("coordination.k8s.io", "leases"): frozenset({"get", "create", "update"}),
}
"""What it needs in its own namespace, to be the only one that acts."""


def observable(kinds: Iterable[str], served: Collection[str]) -> list[str]:
    """Those of these kinds that something lists: an optional one only where its definition is `served`."""
    return [kind for kind in kinds if kind not in OPTIONAL_KINDS or kind in served]
