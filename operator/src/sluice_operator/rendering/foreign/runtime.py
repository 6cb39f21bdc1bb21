"""`spec.runtime.type`: which engine stands behind the gate, how it is started, and what it is refused for.

Owns what both other engines share: the port on the pod's loopback, and what their images need to run as nobody with a
root file system that cannot be written. Pure. Next: `vllm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from sluice_operator.errors import InvalidSpec
from sluice_operator.rendering.foreign import honoured, sglang, vllm
from sluice_operator.resource.spec import ServiceSpec
from sluice_sidecar.config import EngineKind

PORT = 8000
"""Of the other engine, on the pod's loopback."""
_ENGINES: Mapping[str, ModuleType] = {"VLLM": vllm, "SGLang": sglang}


def is_foreign(spec: ServiceSpec) -> bool:
    """Whether another engine than Sluice's own serves."""
    return spec.runtime != "Sluice"


def check(spec: ServiceSpec) -> None:
    """See that the engine can do what the spec asks for.

    Raises:
        InvalidSpec: it cannot; the text names every such field.
    """
    if not is_foreign(spec):
        return
    engine = _ENGINES[spec.runtime]
    found = [*honoured.refused(spec, engine.NAME), *engine.refused(spec)]
    if spec.image is None:
        found.insert(0, ("spec.runtime.image", f"must be set: the operator brings no image of {engine.NAME}"))
    if found:
        (field, problem), *others = found
        raise InvalidSpec(field, "; ".join([problem, *(f"{name}: {text}" for name, text in others)]))


def gate_kind(spec: ServiceSpec) -> EngineKind:
    """What the gate is told of it."""
    kind: EngineKind = _ENGINES[spec.runtime].KIND if is_foreign(spec) else "sluice"
    return kind


def command(spec: ServiceSpec, port: int = PORT) -> list[str]:
    """The whole command line of another engine."""
    engine = _ENGINES[spec.runtime]
    source = spec.model.source
    model = source.hub.repository if source.hub is not None else source.path
    return [*engine.COMMAND, *engine.arguments(spec, model, port)]


def environment(spec: ServiceSpec, cache_dir: str) -> list[dict[str, Any]]:
    """Variables that its image needs, beside what every engine gets."""
    hub = spec.model.source.hub
    variables = {
        # Compiled kernels and the like go below HOME: on the volume that lives as long as the pod, or the user's own.
        "HOME": cache_dir,
        # The user of the pod has no name in the image, and libraries ask for one.
        "USER": "sluice",
        "LOGNAME": "sluice",
        **({"HF_HUB_CACHE": hub.cache_dir} if hub is not None else {}),
        **_ENGINES[spec.runtime].ENVIRONMENT,
    }
    return [{"name": name, "value": value} for name, value in variables.items()]


def local_environment(spec: ServiceSpec) -> dict[str, str]:
    """What its program is told beside the user's own environment where it runs as a local process."""
    return dict(_ENGINES[spec.runtime].ENVIRONMENT)
