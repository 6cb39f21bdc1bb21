"""What engine and gate are told while they run: `live.json`, the promise and what follows from it, read as it changes.

As `config`, frozen dataclasses with the operator at the other end. How the file is followed is `live_file`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sluice_engine.config import require
from sluice_engine.core.terms import CLASSES

Enforcement = Literal["Enforce", "Observe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOConfig:
    """The promise."""

    time_to_first_token_us: int
    """For prompts up to `reference_prompt_tokens`; it grows in proportion beyond."""
    inter_token_latency_us: int
    reference_prompt_tokens: int = 4096
    target_percent: float = 99.0
    """Share of requests, and of one request's gaps, that keep the promise."""
    enforcement: Enforcement = "Enforce"

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(self.time_to_first_token_us > 0, "slo.time_to_first_token_us", "must be positive")
        require(self.inter_token_latency_us > 0, "slo.inter_token_latency_us", "must be positive")
        require(self.reference_prompt_tokens >= 1, "slo.reference_prompt_tokens", "must be at least 1")
        require(50 <= self.target_percent < 100, "slo.target_percent", "must be at least 50 and below 100")

    def ttft_promise_us(self, prompt_tokens: int) -> int:
        """The time to first token promised to a prompt of this length."""
        if prompt_tokens <= self.reference_prompt_tokens:
            return self.time_to_first_token_us
        return self.time_to_first_token_us * prompt_tokens // self.reference_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSchedulingConfig:
    """Prefill, where None is derived from the promise, and aging: what of scheduling may change without a restart."""

    prefill_chunk_tokens: int | None = None
    """Bound on the *sum* of prefill tokens in one step."""
    max_prefill_tokens_per_request: int | None = None
    """Bound on one request's share of a step's prefill."""
    aging_interval_us: int = 20_000_000
    """Waiting that counts as one level of priority; 0 turns aging off."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("prefill_chunk_tokens", "max_prefill_tokens_per_request"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"scheduling.{name}", "must be at least 1")
        require(0 <= self.aging_interval_us <= 3_600_000_000, "scheduling.aging_interval_us", "must be 0 to 1 h")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """How much of the room requests of a class may fill."""

    name: str
    ceiling_percent: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(self.name in CLASSES, "admission.classes.name", f"must be one of {', '.join(CLASSES)}")
        require(1 <= self.ceiling_percent <= 100, "admission.classes.ceiling_percent", "must be 1 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant whose share is not the usual one, or whose use is bounded."""

    name: str
    weight: int = 1
    tokens_per_second: int | None = None
    """Quota of prompt and output tokens together; None: no bound."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(1 <= self.weight <= 1000, "admission.tenants.weight", "must be 1 to 1000")
        quota = self.tokens_per_second
        require(quota is None or 1 <= quota <= 10**9, "admission.tenants.tokens_per_second", "must be 1 to 10^9")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How the gate lets work in."""

    max_wait_us: int = 1_000_000
    """Longest time a request is held at the door before it is admitted or refused."""
    kv_ceiling_percent: int = 95
    """Share of the pool that the predicted peak may reach while nothing is preempted."""
    preemptions_per_minute: float = 6.0
    """Rate above which the ceiling comes down."""
    mode: Enforcement = "Enforce"
    """Observe decides and records, and refuses nothing for load."""
    retry_budget_percent: int = 10
    """Share of the capacity that retries may take; 100: no bound."""
    classes: tuple[ClassConfig, ...] = ()
    """Ceilings of classes where they are not the usual ones."""
    tenants: tuple[TenantConfig, ...] = ()
    """Weights and quotas; whoever is not named has weight 1 and no quota."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(0 <= self.max_wait_us <= 60_000_000, "admission.max_wait_us", "must be 0 to 60 s")
        require(50 <= self.kv_ceiling_percent <= 100, "admission.kv_ceiling_percent", "must be 50 to 100")
        require(self.preemptions_per_minute >= 0, "admission.preemptions_per_minute", "must not be negative")
        require(0 <= self.retry_budget_percent <= 100, "admission.retry_budget_percent", "must be 0 to 100")
        for what, listed in (("classes", self.classes), ("tenants", self.tenants)):
            names = [one.name for one in listed]
            require(len(set(names)) == len(names), f"admission.{what}", f"names one of its {what} twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """`live.json`, read by engine and gate."""

    slo: SLOConfig
    scheduling: LiveSchedulingConfig = field(default_factory=LiveSchedulingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
