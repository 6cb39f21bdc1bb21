"""An InferenceService's spec as typed values: what `parsing.py` makes of a body, and what everything else reads.

The engine's and the gate's own dataclasses carry what is theirs, so that `render.py` only puts them into files. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sluice_engine.config import AdaptersConfig, CacheConfig, ModelConfig, SchedulerConfig
from sluice_engine.live_config import LiveConfig
from sluice_operator.resource.model_source import HubAccess

Json = Mapping[str, Any]
RuntimeType = Literal["Sluice", "VLLM", "SGLang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Between how many replicas an autoscaler may choose."""

    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One InferenceService as wanted."""

    name: str
    namespace: str
    uid: str
    """Of the resource; empty for a manifest that is not in a cluster."""
    generation: int
    model: ModelConfig
    adapters: AdaptersConfig
    hub: HubAccess
    runtime: RuntimeType
    image: str | None
    """The engine's image; None: the operator's default."""
    image_pull_policy: str
    runtime_version: str
    """The release whose pod template is wanted; empty: the one that is kept."""
    replicas: int
    scheduling: SchedulerConfig
    cache: CacheConfig
    live: LiveConfig
    trusted_peers: tuple[str, ...]
    """Networks whose identity headers the gate believes."""
    api_keys_secret: str
    """The Secret that holds the tenants' API keys; empty: no key is asked for."""
    resources: Json
    """Requests, limits and claims, as written."""
    accelerator_count: int
    accelerator_resource: str
    strategy: str
    drain_timeout_us: int
    autoscaling: Autoscaling | None
    """None: `replicas` is somebody else's to set."""
    pod_monitor: bool
    """Whether Prometheus is told to scrape the pods."""
    pod_template: Json
    """What the user adds to the pods, as written."""
    cost_basis: Json
    """The parts of the spec that decide what a step costs: model, runtime, accelerator, resources."""
