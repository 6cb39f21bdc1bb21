"""What is kept of a request once it has ended: all that it takes to replay it, and to compare the replay with it.

A few thousand of them stay in a ring that `/steps` shows beside the step records. `FinishedState` is the short form for
`/state`, which is read five times a second. Times are on the engine's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.core.request import Request

# As many steps as the trace keeps rarely end more requests than this.
ENDED_KEPT = 4096

# 48 bits: two different blocks among a million share a key once in three hundred records.
KEY_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """One request that has ended."""

    request_id: str
    """As in the step records: the gate's id and the choice's index."""
    outcome: str
    prompt_tokens: int
    output_tokens: int
    """Sampled, the model's end among them."""
    max_tokens: int
    priority: int
    tenant: str
    arrival_us: int
    queued_us: int
    """When the loop took it in."""
    queued_step: int
    """Number of the last step that was planned before."""
    first_token_us: int
    """-1: there was none."""
    ended_us: int
    ended_step: int
    """Number of the last step that was planned before its end."""
    prompt_keys: tuple[str, ...] = ()
    """Short keys of the prompt's full blocks, where the prefix cache made them: equal keys are equal beginnings."""


def ended_request(request: Request, now_us: int, step: int, block_tokens: int) -> EndedRequest:
    """What is kept of a request that ends now, after `step` was planned."""
    assert request.outcome is not None, "it has ended"
    return EndedRequest(
        request_id=request.id,
        outcome=request.outcome.value,
        prompt_tokens=request.num_prompt,
        output_tokens=request.num_output,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        tenant=request.tenant,
        arrival_us=request.arrival_us,
        queued_us=request.queued_us,
        queued_step=request.queued_step,
        first_token_us=request.first_token_us,
        ended_us=now_us,
        ended_step=step,
        prompt_keys=tuple(key.hex()[:KEY_DIGITS] for key in request.block_keys[: request.num_prompt // block_tokens]),
    )
