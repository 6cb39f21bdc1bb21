"""Fields of a service's objects that somebody else owns: written by hand, or by another tool, beside the operator's.

Owns the reading of `managedFields`. What the operator sets itself it puts back; what it does not set stays as somebody
left it, in no manifest of theirs or ours. Pure. Next: `diagnosis.py`.
Source: fieldsV1 of Kubernetes, sigs.k8s.io/structured-merge-diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice_operator.observed.moments import ago
from sluice_operator.rendering.labels import FIELD_MANAGER

Object = Mapping[str, Any]

_MOST_PATHS = 5
_HINT = (
    "The operator leaves alone what it does not set. Unwanted: take it out (`kubectl {}`). "
    "Wanted: set it in the InferenceService (podTemplate, resources), where it lasts and is seen."
)
# `kubectl rollout restart` is meant to be done to a Deployment, and asks for nothing that lasts.
_RESTARTED = "spec.template.metadata.annotations[kubectl.kubernetes.io/restartedAt]"


def foreign_fields(item: Object) -> Iterator[tuple[str, str, list[str]]]:
    """Of the spec's fields, those that the operator does not own: manager, when it wrote last, and their paths."""
    entries = [one for one in item["metadata"].get("managedFields") or () if one.get("subresource") != "status"]
    ours: dict[str, Any] = {}
    for one in entries:
        if one.get("manager") == FIELD_MANAGER:
            ours = _joined(ours, one.get("fieldsV1") or {})
    for one in entries:
        if one.get("manager") != FIELD_MANAGER:
            spec = {"f:spec": (one.get("fieldsV1") or {}).get("f:spec") or {}}
            paths = sorted(path for path in _only_in(spec, ours, "") if path != _RESTARTED)
            if paths:
                yield str(one.get("manager", "")), str(one.get("time", "")), paths


def told(items: Sequence[Object], now: str) -> Iterator[str]:
    """A line for each manager of each object, then what to do."""
    edited = ""
    for item in items:
        kind, metadata = str(item.get("kind", "")).lower(), item["metadata"]
        for manager, time, paths in foreign_fields(item):
            edited = edited or f"-n {metadata.get('namespace', '')} edit {kind} {metadata['name']}"
            more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
            when = f" ({since})" if (since := ago(time, now)) else ""
            yield f"{kind}/{metadata['name']}: {manager}{when} set {', '.join(paths[:_MOST_PATHS])}{more}"
    if edited:
        yield f"→ {_HINT.format(edited)}"


def _only_in(fields: Mapping[str, Any], ours: Mapping[str, Any], path: str) -> Iterator[str]:
    """The fields that `ours` has not: an element of a list as a whole, of a map each entry."""
    for key, below in fields.items():
        if key == ".":
            continue
        here = f"{path}{_step(key)}".lstrip(".")
        inside = {name: child for name, child in below.items() if name != "."}
        if key in ours:
            yield from _only_in(inside, ours[key], here)
        elif inside and key.startswith("f:"):
            yield from _only_in(inside, {}, here)
        else:
            yield here


def _step(key: str) -> str:
    """One part of a path, as people write it."""
    kind, _, name = key.partition(":")
    if kind == "f":
        return f".{name}" if name.replace("-", "").replace("_", "").isalnum() else f"[{name}]"
    value = json.loads(name) if kind in {"k", "v"} else name
    return f"[{','.join(str(one) for one in value.values()) if isinstance(value, dict) else value}]"


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _joined(one.get(key, {}), other.get(key, {})) for key in {**one, **other}}
