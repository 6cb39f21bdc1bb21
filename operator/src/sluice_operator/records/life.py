"""One request's life as plain data: what `reconstruct.py` finds in the records, and `story.py` puts into sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice_engine.live_config import SLOConfig
from sluice_sidecar.telemetry.decisions import Decision

ChunkReason = Literal["rest", "prefill_budget", "token_budget", "own_share"]
"""Why a chunk was not larger: it was all there was; the prefill beside decodes is bounded by the promise; the step's
tokens were spent; one request may take only so much of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One step's prefill of this request."""

    step: int
    begin_us: int
    start: int
    num_tokens: int
    real_us: int
    predicted_us: int
    decode_requests: int
    """That decoded in the same step."""
    others_prefill_tokens: int
    prefill_budget_tokens: int
    """What the step could have prefilled in all."""
    reason: ChunkReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A time in the engine's queue."""

    from_us: int
    until_us: int | None
    """None while it still waits."""
    steps: int
    """Steps that ran meanwhile."""
    held_by: dict[str, int]
    """Steps by what held this request, or where the record has no name, whoever waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """One preemption, and what became of it."""

    step: int
    at_us: int
    num_computed: int
    freed_blocks: int
    recompute_us: int
    swap_us: int | None
    choice: str
    reason: str
    beneficiary_id: str
    resumed_step: int | None
    resumed_us: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between tokens, as the engine made them."""

    number: int
    p50_us: int
    p99_us: int
    longest_us: int
    over: int
    """Longer than the promise."""
    longest_step: int
    longest_prefill_tokens: int
    """Prefill of others in the step that ended the longest gap."""
    longest_preempted: bool
    """Whether it was preempted in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceLife:
    """One choice of the call: what the engine did with it."""

    request_id: str
    """The engine's own id: the call's and the choice's index."""
    status: str
    """running, waiting, how it ended, or empty where nobody says."""
    prompt_tokens: int | None
    output_tokens: int | None
    slot: int | None
    cached_tokens: int
    """Tokens that it had from the prefix cache at its first step."""
    waits: tuple[Wait, ...]
    chunks: tuple[Chunk, ...]
    suspensions: tuple[Suspension, ...]
    first_token_us: int | None
    first_token_step: int | None
    decode_steps: int
    last_step: int | None
    last_us: int | None
    least_beside: int | None
    """Fewest others in a step of it."""
    most_beside: int | None
    neighbours: tuple[tuple[str, int], ...]
    """Those that shared most of its steps, and how many steps."""
    num_neighbours: int
    gaps: Gaps | None
    is_cut: bool
    """Its beginning is older than the oldest record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One call from its arrival to its end, as far as it was recorded."""

    request_id: str
    decision: Decision | None
    """The gate's; None where it has forgotten it."""
    same_client_id: tuple[str, ...]
    """Other calls with the same `x-request-id`: attempts of one client."""
    promise: SLOConfig | None
    choices: tuple[ChoiceLife, ...]
    oldest_step: int | None
    """Of the record."""
