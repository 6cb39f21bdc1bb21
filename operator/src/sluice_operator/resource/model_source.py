"""Where a service's weights come from: `spec.model.source` as the engine is told, and what its pod gets for it.

Owns the mounts of the claim and of the hub's cache, and the token's way from its Secret into the engine. Which source
is named, and that it is one alone, are the CRD's rules. Pure. Next: `pod_template.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_engine.config import HubSource, ModelSource
from sluice_operator.errors import InvalidSpec

Object = dict[str, Any]

MODEL_DIR = "/var/lib/sluice/model"
"""Where the claim is mounted in the engine container."""
_VOLUME = "sluice-model"
_HUB_VOLUME = "sluice-hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """What a pod needs for a hub's model beside its name."""

    token_secret: str = ""
    """The Secret with the token; empty: none is sent."""
    token_key: str = ""
    cache_volume: str = ""
    """The user's volume that the files are kept on; empty: one that lives as long as the pod."""


def parse_source(source: Mapping[str, Any]) -> ModelSource:
    """What the engine is told.

    Raises:
        InvalidSpec: the source is none that this version knows.
    """
    if "demo" in source:
        return ModelSource(demo=source["demo"]["name"])
    if "image" in source:
        return ModelSource(path=source["image"]["path"])
    if "persistentVolumeClaim" in source:
        claim = source["persistentVolumeClaim"]
        path = claim.get("path", "").strip("/")
        return ModelSource(path=f"{MODEL_DIR}/{path}".rstrip("/"), claim=claim["claimName"])
    if "huggingFace" in source:
        hub = source["huggingFace"]
        return ModelSource(
            hub=HubSource(repository=hub["repository"], revision=hub["revision"], file=hub.get("file", ""))
        )
    raise InvalidSpec("spec.model.source", "names no source that this version of the operator knows")


def parse_access(source: Mapping[str, Any]) -> HubAccess:
    """What the pod is given for it."""
    hub = source.get("huggingFace", {})
    token = hub.get("tokenSecretRef", {})
    return HubAccess(
        token_secret=token.get("name", ""), token_key=token.get("key", ""), cache_volume=hub.get("cacheVolume", "")
    )


def model_volumes(source: ModelSource, access: HubAccess) -> list[Object]:
    """The volumes that the source needs beside the user's own."""
    if source.claim:
        # Read-only twice: a claim that many pods share may be of a kind that only then can be.
        return [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}]
    if source.hub is not None and not access.cache_volume:
        return [{"name": _HUB_VOLUME, "emptyDir": {}}]
    return []


def model_mounts(source: ModelSource, access: HubAccess) -> list[Object]:
    """Where the engine container sees them."""
    if source.claim:
        return [{"name": _VOLUME, "mountPath": MODEL_DIR, "readOnly": True}]
    if source.hub is not None:
        return [{"name": access.cache_volume or _HUB_VOLUME, "mountPath": source.hub.cache_dir}]
    return []


def model_environment(access: HubAccess) -> list[Object]:
    """The token as a variable of the engine: it is in no file of ours, and in nothing that the operator reads."""
    if not access.token_secret:
        return []
    key = {"name": access.token_secret, "key": access.token_key}
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}}]
