"""Where a service's weights come from: `spec.model.source` as the engine is told, and what its pod gets for it.

Owns the mount of the claim. Which source is named, and that it is one alone, are the CRD's rules. Pure. Next:
`pod_template.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_engine.config import ModelSource
from sluice_operator.errors import InvalidSpec

Object = dict[str, Any]

MODEL_DIR = "/var/lib/sluice/model"
"""Where the claim is mounted in the engine container."""
_VOLUME = "sluice-model"


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
    raise InvalidSpec("spec.model.source", "names no source that this version of the operator knows")


def model_volumes(source: ModelSource) -> list[Object]:
    """The volumes that the source needs."""
    if not source.claim:
        return []
    # Read-only twice: a claim that many pods share may be of a kind that only then can be.
    return [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}]


def model_mounts(source: ModelSource) -> list[Object]:
    """Where the engine container sees them."""
    return [{"name": _VOLUME, "mountPath": MODEL_DIR, "readOnly": True}] if source.claim else []
