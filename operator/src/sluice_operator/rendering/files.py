"""The two programs' files: what engine and gate are told, and where they find it.

Owns the step from a spec to `engine.json`, `gate.json` and `live.json`. A pod and local processes get the very same
contents; only `Paths` differ. Pure. Next: `pod_template.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sluice_engine import codec
from sluice_engine.config import EngineConfig, ModelConfig, ModelSource
from sluice_engine.live_config import LiveConfig
from sluice_operator.rendering.foreign.runtime import PORT, gate_kind, is_foreign
from sluice_operator.resource.spec import ServiceSpec
from sluice_sidecar.config import GateConfig

ENDPOINT_PROPAGATION_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the two programs find their files. The defaults are a pod's; local processes use folders of their own."""

    run_dir: str = "/run/sluice"
    config_dir: str = "/etc/sluice/config"
    live_dir: str = "/etc/sluice/live"
    keys_dir: str = "/etc/sluice/keys"
    cache_dir: str = "/var/cache/sluice"
    hub_dir: str = "/var/lib/sluice/hub"
    termination_log: str = "/dev/termination-log"
    engine_port: int = PORT
    """Of another engine than our own, on the loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The contents of `engine.json`, `gate.json` and `live.json`."""

    engine: EngineConfig
    gate: GateConfig
    live: LiveConfig
    has_own_engine: bool
    """Whether anybody reads `engine.json`: other engines are told by their flags."""

    def at_start(self) -> dict[str, str]:
        """What the programs are started with: file name to content."""
        engine = {"engine.json": codec.to_json(self.engine)} if self.has_own_engine else {}
        return {**engine, "gate.json": codec.to_json(self.gate)}


def files(spec: ServiceSpec, paths: Paths, otlp_endpoint: str = "") -> Files:
    """What engine and gate are told; `otlp_endpoint` is where the gate sends spans, nowhere when empty."""
    socket = f"{paths.run_dir}/engine.sock"
    live_path = f"{paths.live_dir}/live.json"
    return Files(
        engine=EngineConfig(
            model=_with_hub_at(spec.model, paths.hub_dir),
            cache=spec.cache,
            scheduling=spec.scheduling,
            adapters=spec.adapters,
            accelerator_count=spec.accelerator_count,
            tensor_parallel=max(1, spec.accelerator_count),
            socket_path=socket,
            live_path=live_path,
            table_dir=paths.cache_dir,
            termination_message_path=paths.termination_log,
        ),
        gate=GateConfig(
            served_name=spec.model.served_name,
            engine_socket=socket,
            **_foreign_engine(spec, paths.engine_port),
            live_path=live_path,
            run_dir=paths.run_dir,
            drain_timeout_us=spec.drain_timeout_us,
            trusted_peers=spec.trusted_peers,
            api_keys_dir=paths.keys_dir if spec.api_keys_secret else "",
            otlp_endpoint=otlp_endpoint,
            endpoint_propagation_us=ENDPOINT_PROPAGATION_S * 1_000_000,
        ),
        live=spec.live,
        has_own_engine=not is_foreign(spec),
    )


def _foreign_engine(spec: ServiceSpec, port: int) -> dict[str, Any]:
    """What the gate is told of another engine."""
    if not is_foreign(spec):
        return {}
    return {
        "engine": gate_kind(spec),
        "engine_url": f"http://127.0.0.1:{port}",
        "engine_max_sequences": spec.scheduling.max_sequences,
        "engine_chunk_tokens": spec.live.scheduling.prefill_chunk_tokens or spec.scheduling.token_budget,
        "engine_priorities": spec.scheduling.policy == "Priority",
    }


def _with_hub_at(model: ModelConfig, folder: str) -> ModelConfig:
    hub = model.source.hub
    return model if hub is None else replace(model, source=ModelSource(hub=replace(hub, cache_dir=folder)))


def arguments(program: str, paths: Paths) -> list[str]:
    """Arguments of `engine` or `gate`, after the program's name."""
    return ["--config", f"{paths.config_dir}/{program}.json"]
