"""What a local process can have of a pod: its engine's environment; what it cannot have, and what says nothing here.

Owns the answer for `spec.podTemplate` and for what else of a spec lives in a cluster, so that `sluice run` drops none
of it silently. Pure. Next: `pod.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice_engine.config import ModelSource
from sluice_operator.resource.model_source import HubAccess
from sluice_operator.resource.spec import ServiceSpec

_ENV = "spec.podTemplate.engine.env"
# `$(NAME)` is the value of an earlier variable, and `$$` is a dollar sign, as Kubernetes has it.
_REFERENCE = re.compile(r"\$\$|\$\(([^()\s]+)\)")


def refusals(spec: ServiceSpec) -> list[str]:
    """What the programs would miss as local processes: one line a field, empty when it misses nothing."""
    engine = spec.pod_template.get("engine", {})
    found = []
    for index, variable in enumerate(engine.get("env", ())):
        for key in sorted(variable.keys() - {"name", "value"}):
            what = "its value is in a cluster: write it as value to run here" if key == "valueFrom" else "is unknown"
            found.append(f"{_ENV}[{index}].{key}: {what} (variable {variable['name']})")
    cluster = "is in a cluster, which a local process cannot read: write the variables under env to run here"
    found += [f"spec.podTemplate.engine.envFrom[{index}]: {cluster}" for index in range(len(engine.get("envFrom", ())))]
    mount = "no volume is mounted for a local process: take it out, and name a folder of this machine where one is read"
    for field, items in (
        ("volumes", spec.pod_template.get("volumes", ())),
        ("engine.volumeMounts", engine.get("volumeMounts", ())),
    ):
        found += [
            f"spec.podTemplate.{field}[{index}] ({item['name']}): {mount}"
            for index, item in enumerate(items)
            if item["name"] != spec.hub.cache_volume  # what it would keep, the user's own cache does
        ]
    if spec.model.source.claim:
        why = "the claim is in a cluster, which a local process cannot read: name its files on this machine by --model"
        found.append(f"spec.model.source.persistentVolumeClaim: {why}")
    if spec.api_keys_secret:
        why = "the Secret is in a cluster, which a local process cannot read: take it out to run here without keys"
        found.append(f"spec.admission.apiKeysSecretRef: {why}")
    return found


def with_model(spec: ServiceSpec, path: str) -> ServiceSpec:
    """The same service with a folder or GGUF file of this machine (an absolute path) for its `model.source`."""
    return replace(spec, model=replace(spec.model, source=ModelSource(path=path)), hub=HubAccess())


def environment(spec: ServiceSpec) -> dict[str, str]:
    """The engine's variables of a manifest that `refusals` has nothing against."""
    variables: dict[str, str] = {}
    for variable in spec.pod_template.get("engine", {}).get("env", ()):
        variables[variable["name"]] = _expanded(variable.get("value", ""), variables)
    return variables


def without_meaning(spec: ServiceSpec) -> list[str]:
    """Fields that are set and place, name or size pods: they change nothing about a local process."""
    fields = {
        "spec.replicas": spec.replicas != 1,
        "spec.runtime.image": spec.image is not None,
        "spec.model.source.huggingFace.tokenSecretRef": bool(spec.hub.token_secret),
        "spec.model.source.huggingFace.cacheVolume": bool(spec.hub.cache_volume),
        "spec.resources": _is_set(spec.resources),
        **{f"spec.podTemplate.{name}": _is_set(value) for name, value in spec.pod_template.items()},
    }
    answered = {"spec.podTemplate.engine", "spec.podTemplate.volumes"}
    return [field for field, is_set in fields.items() if is_set and field not in answered]


def _is_set(value: Any) -> bool:  # noqa: ANN401  # a manifest's own value
    return any(map(_is_set, value.values())) if isinstance(value, Mapping) else bool(value)


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        # A name that is not known yet stays as it is written.
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(replaced, value)
