"""What a call would take of a pod that is full: tokens to compute, and KV blocks for as long as they are held.

One measure for all who add up what is asked for: demand, headroom, and the shares of tenants. Pure. Must not know who
asks, nor what is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sluice_engine.core.fit import blocks_for
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.limits import Limits


@dataclass(slots=True)
class Work:
    """An amount of work."""

    requests: int = 0
    prefill_tokens: int = 0
    """Prompt tokens to compute."""
    output_tokens: int = 0
    """Output tokens expected."""
    block_us: int = 0
    """KV blocks, times how long a full pod would hold them."""

    @property
    def tokens(self) -> int:
        """All tokens to compute."""
        return self.prefill_tokens + self.output_tokens

    def add(self, other: Work, times: int = 1) -> None:
        """Count more; with −1 for `times`, less."""
        self.requests += times * other.requests
        self.prefill_tokens += times * other.prefill_tokens
        self.output_tokens += times * other.output_tokens
        self.block_us += times * other.block_us

    def part(self, times: int, of: int) -> Work:
        """So many times the `of`th part of it, to whole numbers."""
        return Work(
            round(self.requests * times / of),
            round(self.prefill_tokens * times / of),
            round(self.output_tokens * times / of),
            round(self.block_us * times / of),
        )


def work_of(cost: Cost, limits: Limits) -> Work:
    """What a call would take of a pod that is full."""
    step_us = limits.decode_step_us(limits.max_sequences)
    work = Work(1, cost.prefill_tokens, cost.decode_tokens)
    for choice in cost.choices:
        prefill_us = limits.computing_us(choice.prompt_tokens - choice.cached_tokens)
        stay_us = prefill_us + choice.output_tokens * step_us
        work.block_us += held_blocks(choice.prompt_tokens, choice.output_tokens, limits) * stay_us
    return work


def held_blocks(prompt_tokens: int, output_tokens: int, limits: Limits) -> int:
    """KV blocks that a choice holds on average: it grows by a token a step, so half of its output."""
    return blocks_for(prompt_tokens + output_tokens // 2, limits.block_tokens)


def total(works: Iterable[Work]) -> Work:
    """All of it."""
    whole = Work()
    for work in works:
        whole.add(work)
    return whole
