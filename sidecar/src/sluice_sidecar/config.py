"""What a gate is told: `gate.json`, beside `engine.json` in the same immutable ConfigMap; it also reads `live.json`.

Durations are integer microseconds, sizes are bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sluice_engine.config import require
from sluice_sidecar.callers.trust import is_network

EngineKind = Literal["sluice", "vllm", "sglang", "llamacpp"]
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """`gate.json`."""

    served_name: str
    """The model's name, for labels and messages."""
    host: str = "::"
    """Dual-stack wildcard; where the kernel has no IPv6 the gate listens on 0.0.0.0."""
    port: int = 8080
    """`/v1/*`, `/livez`, `/readyz`. 0 takes a free one and logs it."""
    admin_port: int = 9090
    """`/metrics`, `/state`, `/steps`, `/engine/startupz`, `/engine/livez`."""
    engine: EngineKind = "sluice"
    engine_socket: str = "/run/sluice/engine.sock"
    """Where Sluice's own engine listens."""
    engine_url: str = ""
    """Where another engine listens, on this pod's loopback: `http://127.0.0.1:8000`."""
    engine_max_sequences: int | None = None
    """Requests that another engine was started to run at once; None: as it tells, or as is learned."""
    engine_kv_tokens: int | None = None
    """Tokens that another engine's KV cache holds; None: as it tells."""
    engine_chunk_tokens: int | None = None
    """Prefill that one step of another engine takes at most; None: as it tells, or its program's default."""
    engine_priorities: bool = False
    """Whether another engine was started with its priority scheduling; without it, it refuses a priority."""
    live_path: str = "/etc/sluice/live/live.json"
    run_dir: str = "/run/sluice"
    """Where `drained` is written, and `gate-address.json` with the bound addresses for local runs."""
    state_interval_us: int = 200_000
    stale_after_us: int = 500_000
    blind_after_us: int = 5_000_000
    drain_timeout_us: int = 120_000_000
    endpoint_propagation_us: int = 5_000_000
    """How long a draining gate still accepts: endpoints take this long to forget the pod."""
    body_limit_bytes: int = 8 * 1024 * 1024
    held_bodies_bytes: int = 256 * 1024 * 1024
    """All request bodies held together."""
    trusted_peers: tuple[str, ...] = ()
    """Networks (CIDR) of peers whose class and tenant headers are believed: a gateway's, a router's."""
    api_keys_dir: str = ""
    """A mounted Secret: each file is named for a tenant and holds its keys, one a line. Empty: no key is asked for."""
    otlp_endpoint: str = ""
    """Where spans are sent (OTLP over HTTP); empty: none are made."""
    stall_timeout_us: int = 30_000_000
    """A client that reads nothing for this long is cut and its engine request aborted."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(bool(self.served_name), "served_name", "must not be empty")
        for name in ("port", "admin_port"):
            require(0 <= getattr(self, name) <= 65535, name, "must be 0 to 65535")
        for name in ("state_interval_us", "stale_after_us", "blind_after_us", "drain_timeout_us", "stall_timeout_us"):
            require(getattr(self, name) > 0, name, "must be positive")
        for network in self.trusted_peers:
            require(is_network(network), "trusted_peers", f"{network!r} is no network; write for example 10.0.0.0/8")
        for name in ("engine_url", "otlp_endpoint"):
            url = getattr(self, name)
            require(not url or _URL.fullmatch(url) is not None, name, "must be an http:// or https:// URL")
        for name in ("engine_max_sequences", "engine_kv_tokens", "engine_chunk_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "must be at least 1")
        is_own = self.engine == "sluice"
        require(is_own != bool(self.engine_url), "engine_url", "belongs to every engine but sluice, which has a socket")
        require(self.endpoint_propagation_us >= 0, "endpoint_propagation_us", "must not be negative")
        require(
            1024 <= self.body_limit_bytes <= self.held_bodies_bytes, "body_limit_bytes", "1024 to held_bodies_bytes"
        )
