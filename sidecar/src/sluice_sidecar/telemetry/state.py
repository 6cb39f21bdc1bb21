"""`/state` of the gate, versioned JSON: what it measured at the door, what it holds, and the engine's own state within.

Read by the operator. Readers decode with `ignore_unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice_engine.core.state import EngineState
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.telemetry.regret import Verdicts

SCHEMA_VERSION = "1.2"

NO_CAPACITY = frozenset({"draining", "engine_loading", "engine_dead"})
"""Why a door is shut under whatever mode: nothing would be there to serve."""

Freshness = Literal["fresh", "stale", "blind", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What clients saw in the last five minutes; None without traffic."""

    time_to_first_token_us: int | None = None
    """At the promise's target percentile."""
    inter_token_latency_us: int | None = None
    requests: int = 0
    good_requests: int = 0
    good_requests_per_minute: float = 0.0
    preemptions_per_minute: float = 0.0
    kv_usage_percent: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The door now."""

    open: bool
    """Whether there is room for one more small request now."""
    reason: str = ""
    """Why not: the reason code of the refusal it would get."""
    kv_ceiling_percent: float = 0.0
    """As steered by the preemption rate."""
    predicted_peak_blocks: int = 0
    ledger_requests: int = 0
    ledger_blocks: int = 0
    waiting_at_door: int = 0
    admitted_total: int = 0
    refused_total: dict[str, int]
    """By reason code."""
    mode: str = "Enforce"
    """Enforce, or Observe: decides and records, and refuses nothing for load."""
    verdicts: Verdicts | None = None
    """Verdicts held against what became of the requests; None from a gate that does not say."""
    retry_share: float = 0.0
    """Of retries in the work let in of late."""

    @property
    def only_watches(self) -> bool:
        """Whether Enforce would refuse for load now, and Observe lets in all the same."""
        return self.mode == "Observe" and not self.open and self.reason not in NO_CAPACITY

    @property
    def refuses(self) -> bool:
        """Whether one more small request would be refused now."""
        return not self.open and not self.only_watches


@dataclass(frozen=True, slots=True, kw_only=True)
class Demanded:
    """What is asked of this pod, over the last half minute; a request that is sent again counts once."""

    admitted_tokens_per_second: float = 0.0
    """Tokens to compute: prompt tokens not found computed, and expected output."""
    shed_tokens_per_second: float = 0.0
    queued_tokens: int = 0
    """Of those that wait at the door now."""
    admitted_blocks: float = 0.0
    """KV blocks that this work would hold on average."""
    shed_blocks: float = 0.0
    queued_block_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What is still to be had now, within the promise."""

    slots: int
    blocks: int
    """KV blocks below the ceiling, the growth of what is inside reckoned with."""
    tokens_per_second: int | None
    """Prefill and output together, beside what is let in now; None while no traffic tells how requests are made."""
    capacity_tokens_per_second: int | None
    """The same of an empty pod."""
    class_cut: str | None
    """The least urgent class that is let in now; None: nobody is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """The whole document."""

    schema_version: str
    ready: bool
    draining: bool
    freshness: Freshness
    live_config_hash: str
    """Of the `live.json` that the gate obeys."""
    live_config_refused: str = ""
    """Why the one that lies there now is not obeyed; empty where it is."""
    gate_config_hash: str
    measured: Measured
    admission: Admission
    engine: EngineState | None
    demand: Demanded | None = None
    headroom: Headroom | None = None
    promise: SLOConfig | None = None
    """What is held against; None from a gate that does not say."""
    api_keys: int | None = None
    """How many keys are in force; None where no key is asked for."""
    api_keys_refused: str = ""
    """Why the keys that lie there now are not in force; empty where they are."""

    @property
    def shut(self) -> str:
        """Why one more small request would be refused now; empty where it would not be."""
        if self.api_keys == 0:
            return "no API key is in force"
        return self.admission.reason if self.admission.refuses else ""
