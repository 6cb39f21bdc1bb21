"""What the operator itself is told: environment variables that the chart sets. Owns their defaults and checks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice_operator.errors import InvalidSettings
from sluice_operator.rendering.kept import release_id
from sluice_operator.rendering.pod_template import Images
from sluice_operator.rendering.surroundings import Surroundings

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the operator."""

    images: Images
    """SLUICE_ENGINE_IMAGE, SLUICE_GATE_IMAGE: what pods run where spec.runtime.image is not set."""
    namespaces: tuple[str, ...] = ()
    """SLUICE_WATCH_NAMESPACES, separated by commas; empty: all."""
    log_level: str = "INFO"
    """SLUICE_LOG_LEVEL."""
    metrics_port: int = 8081
    """SLUICE_METRICS_PORT: /metrics, /livez, /readyz. 0 takes a free one and logs it."""
    resync_s: float = 300.0
    """SLUICE_RESYNC_SECONDS: how often everything is looked at again, whatever the watches said."""
    otlp_endpoint: str = ""
    """SLUICE_OTLP_ENDPOINT: where the gates of all services send spans (OTLP over HTTP); empty: nowhere."""
    poll_s: float = 5.0
    """SLUICE_POLL_SECONDS: how often running pods are asked for their state."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    """SLUICE_NETWORK_POLICY (Enabled, Disabled), SLUICE_ADMIN_NAMESPACES (separated by commas, the operator's own among
    them), SLUICE_POD_MONITOR_LABELS (`name=value`, separated by commas), SLUICE_PROMETHEUS_URL."""

    release: str = "0"
    """The release, with what pods get from its operator: `0.2.0+1f3a…`. Not an option: it follows from them."""
    lease: tuple[str, str] | None = None
    """SLUICE_LEASE, as namespace/name: what the acting operator holds. None: no other one runs, so none is needed."""
    identity: str = ""
    """SLUICE_IDENTITY: whose the Lease is, the pod's name. A container that comes back in its pod has it still."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.log_level not in _LOG_LEVELS:
            raise InvalidSettings(f"SLUICE_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, not {self.log_level!r}")
        if not 0 <= self.metrics_port <= 65535:
            raise InvalidSettings("SLUICE_METRICS_PORT must be 0 to 65535")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidSettings("SLUICE_OTLP_ENDPOINT must be an http:// or https:// URL")
        prometheus = self.surroundings.prometheus_url
        if prometheus and not prometheus.startswith(("http://", "https://")):
            raise InvalidSettings("SLUICE_PROMETHEUS_URL must be an http:// or https:// URL")
        if self.resync_s < 10:
            raise InvalidSettings("SLUICE_RESYNC_SECONDS must be at least 10")
        if self.poll_s < 1:
            raise InvalidSettings("SLUICE_POLL_SECONDS must be at least 1")
        if self.lease is not None and not self.identity:
            raise InvalidSettings("SLUICE_IDENTITY must be set to the pod's name where SLUICE_LEASE is set")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings in an environment.

    Raises:
        InvalidSettings: one is missing or breaks a rule; the text names it.
    """
    images = {}
    for role in ("engine", "gate"):
        name = f"SLUICE_{role.upper()}_IMAGE"
        if not environment.get(name):
            raise InvalidSettings(f"{name} must be set to the image of the {role}")
        images[role] = environment[name]
    return Settings(
        images=Images(engine=images["engine"], gate=images["gate"]),
        namespaces=_names(environment, "SLUICE_WATCH_NAMESPACES"),
        log_level=environment.get("SLUICE_LOG_LEVEL", "INFO").upper(),
        metrics_port=_port(environment, "SLUICE_METRICS_PORT", "8081"),
        release=release_id(
            importlib.metadata.version("sluice-operator"), [images, environment.get("SLUICE_OTLP_ENDPOINT", "")]
        ),
        otlp_endpoint=environment.get("SLUICE_OTLP_ENDPOINT", ""),
        resync_s=_number(environment, "SLUICE_RESYNC_SECONDS", "300"),
        poll_s=_number(environment, "SLUICE_POLL_SECONDS", "5"),
        surroundings=Surroundings(
            network_policy=_switch(environment, "SLUICE_NETWORK_POLICY"),
            admin_namespaces=_names(environment, "SLUICE_ADMIN_NAMESPACES"),
            pod_monitor_labels=_pairs(environment, "SLUICE_POD_MONITOR_LABELS"),
            prometheus_url=environment.get("SLUICE_PROMETHEUS_URL", ""),
        ),
        lease=_lease(environment.get("SLUICE_LEASE", "")),
        identity=environment.get("SLUICE_IDENTITY", ""),
    )


def _names(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in environment.get(name, "").split(",") if word.strip())


def _pairs(environment: Mapping[str, str], name: str) -> dict[str, str]:
    pairs = {}
    for word in _names(environment, name):
        key, separator, value = word.partition("=")
        if not (key and separator):
            raise InvalidSettings(f"{name} must be name=value, separated by commas; {word!r} is none")
        pairs[key] = value
    return pairs


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "Enabled")
    if text not in {"Enabled", "Disabled"}:
        raise InvalidSettings(f"{name} must be Enabled or Disabled, not {text!r}")
    return text == "Enabled"


def _lease(text: str) -> tuple[str, str] | None:
    if not text:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise InvalidSettings(f"SLUICE_LEASE must be namespace/name, not {text!r}")
    return namespace, name


def _port(environment: Mapping[str, str], name: str, default: str) -> int:
    number = _number(environment, name, default)
    if not number.is_integer():
        raise InvalidSettings(f"{name} must be a whole number, not {number:g}")
    return int(number)


def _number(environment: Mapping[str, str], name: str, default: str) -> float:
    text = environment.get(name, default)
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise InvalidSettings(f"{name} must be a number, not {text!r}")
