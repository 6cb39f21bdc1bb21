"""A service's LoRA adapters: `spec.model.adapters` and `spec.model.adapterLoading` as the engine is told.

Owns what a path means: absolute in the engine's container, else from the root of the volume that the model is on. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_engine.config import AdaptersConfig, AdapterSource
from sluice_operator.errors import InvalidSpec
from sluice_operator.resource.model_source import MODEL_DIR


def parse_adapters(model: Mapping[str, Any], served_name: str, accelerator_count: int) -> AdaptersConfig:
    """What the engine is told.

    Raises:
        InvalidSpec: an adapter has the model's own name, or there are several devices.
    """
    preloaded = tuple(
        AdapterSource(name=one["name"], path=_in_container(one["path"])) for one in model.get("adapters", ())
    )
    # Left out it has no defaults in the resource: what a definition brings with an upgrade would be in every model, and
    # an operator of before, which runs a moment longer, would take it for a change.
    loading = model.get("adapterLoading")
    if loading is None:
        adapters = AdaptersConfig(preloaded=preloaded)
    else:
        adapters = AdaptersConfig(
            preloaded=preloaded,
            max_loaded=loading["maxLoaded"],
            max_running=loading["maxRunning"],
            directory=_in_container(loading["directory"]) if "directory" in loading else "",
        )
    if served_name in {source.name for source in adapters.preloaded}:
        problem = f"{served_name!r} is the model's own name: give the adapter another, or set model.servedName"
        raise InvalidSpec("spec.model.adapters", problem)
    if adapters.are_served and accelerator_count > 1:
        problem = "adapters run on one device alone: set accelerator.count to 1, or leave them out"
        raise InvalidSpec("spec.model.adapters", problem)
    return adapters


def _in_container(path: str) -> str:
    return path if path.startswith("/") else f"{MODEL_DIR}/{path.strip('/')}"
