"""What one step does, and what came of it: the messages between scheduler and runner.

Plans carry a step number and requests an incarnation, so a result that comes late is recognised and never applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice_engine.core.host_pool import Copies
from sluice_engine.core.request import Outcome, Request

IdleReason = Literal["no_requests", "no_free_blocks", "no_free_slots", "entry_latched", "budget_exhausted"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: its tokens [start, start + num_tokens)."""

    request: Request
    incarnation: int
    slot: int
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of these tokens is the last known one, so that a new token is sampled after it."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A victim, and what it lost."""

    request_id: str
    num_computed: int
    freed_blocks: int
    recompute_us: int
    """Price of computing its state again, from the measured table."""
    beneficiary_id: str
    """The request that needed the blocks."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    decode_requests: int
    prefill_tokens: int
    context_tokens: int
    """KV tokens that the decodes attend to, their own included."""
    prior_pairs: int = 0
    """Query–key pairs of the prefill with tokens computed before this step."""
    preempted: tuple[Preemption, ...] = ()
    swap_out: Copies = ()
    """KV to take to the host before the step computes: pairs (device block, host block)."""
    swap_in: Copies = ()
    """KV to bring back, after all copies out and before the step computes: pairs (device block, host block)."""
    idle_reason: IdleReason | None = None
    """Why nothing runs; None when something does."""
    waiting_reasons: tuple[tuple[IdleReason, int], ...] = ()
    """Requests that stay waiting, counted by the gate that held them."""
    predicted_us: int = 0
    tokens_left: int = 0
    """Of the token budget, after planning."""
    prefill_left: int = 0
    free_blocks_before: int = 0
    free_blocks_after: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a runner to do: a plan may copy and compute nothing."""
        return not (self.scheduled or self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for one request of a step."""

    request_id: str
    incarnation: int
    token_id: int
    logprob: float | None = None
    error: str | None = None
    """Set when this request alone failed (its logits were not finite); token_id is then meaningless."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: one token for each scheduled request with `samples`."""

    step: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """What a request's caller is told after a step: a token, an end, or both."""

    request: Request
    token_id: int | None = None
    """None when the request ended without a new token."""
    logprob: float | None = None
    outcome: Outcome | None = None
    """Set with the last emission of a request."""
