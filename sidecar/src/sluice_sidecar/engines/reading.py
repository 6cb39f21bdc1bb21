"""What another engine tells of itself, in words that fit each: its metrics page read once, and facts that stay.

Pure. None is a value: there is no such series, or its value is no number. It is never taken for zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One page. Summed over ranks."""

    running: int | None
    waiting: int | None
    kv_tokens: int | None = None
    """What the KV cache holds at most."""
    kv_used_tokens: int | None = None
    block_tokens: int | None = None
    context_tokens: int | None = None
    preemptions_total: int | None = None
    gap_seconds_total: float | None = None
    """Time between output tokens, over all that were given."""
    gaps_total: int | None = None
    prompt_tokens_total: int | None = None
    output_tokens_total: int | None = None
    steps_total: int | None = None
    started_s: float | None = None
    """When the process started, where it tells."""
    asleep: bool = False
    """Its weights are not in place; it serves nobody until it is woken."""

    @property
    def counters(self) -> tuple[float, ...]:
        """What only ever grows while a process lives."""
        values = (
            self.preemptions_total, self.gaps_total, self.prompt_tokens_total, self.output_tokens_total,
            self.steps_total,
        )  # fmt: skip
        return tuple(-1 if value is None else value for value in values)

    def restarted_since(self, earlier: Reading) -> bool:
        """Whether another process tells this: a counter that fell is a new start, never a negative count."""
        if None not in {self.started_s, earlier.started_s} and self.started_s != earlier.started_s:
            return True
        return any(now < then for now, then in zip(self.counters, earlier.counters, strict=True) if now >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What stays as it is while a process lives."""

    model: str
    context_tokens: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    max_sequences: int | None = None
    chunk_tokens: int | None = None
    """Prefill that one step takes at most."""


Unhealthy = Literal["loading", "failed", "silent"]
"""What it means when `/health` answers with an error."""
