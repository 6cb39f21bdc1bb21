"""How much fits: what the engine measured of itself, and how long a prefill takes.

Pure functions over what the engine measured of itself. Must not know requests, HTTP or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice_engine.core.fit import unfit_reason
from sluice_engine.core.state import EngineState, PrefillCost
from sluice_engine.live_config import LiveConfig, LiveSchedulingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine derived and measured, as the decision needs it."""

    max_length_tokens: int
    block_tokens: int
    total_blocks: int
    max_sequences: int
    token_budget: int
    inter_token_latency_us: int
    fixed_us: int
    decode_us: int
    per_prefill_token_ns: int
    """Of a token at the start of its prompt, where the engine tells."""
    per_prior_pair_ps: int = 0
    """What each token before it adds to a token of prefill."""
    decode_curve_us: tuple[tuple[int, int], ...] = ()
    chunk: LiveSchedulingConfig
    """What is set for every step; the engine obeys it also where more would fit."""
    fills_tokens: int | None = None
    """What another engine fills every step with, whatever the promise says."""

    @classmethod
    def from_state(cls, state: EngineState, live: LiveConfig) -> Limits | None:
        """The limits of a ready engine; None while it has not derived any."""
        if state.pool is None or state.derived is None or state.step_cost is None:
            return None
        fills_tokens = None if state.engine == "sluice" else max(1, state.derived.chunk_ceiling_tokens)
        prefill = state.prefill_cost or PrefillCost(
            per_token_ns=state.step_cost.per_prefill_token_ns, per_prior_pair_ps=0
        )
        return cls(
            max_length_tokens=state.max_length_tokens,
            block_tokens=state.pool.block_tokens,
            total_blocks=state.pool.total_blocks,
            # An engine that cannot keep the promise serves all the same, one request at a time.
            max_sequences=max(1, state.derived.max_sequences),
            token_budget=state.derived.token_budget,
            inter_token_latency_us=live.slo.inter_token_latency_us,
            fixed_us=state.step_cost.fixed_us,
            decode_us=state.step_cost.decode_us,
            per_prefill_token_ns=prefill.per_token_ns,
            per_prior_pair_ps=prefill.per_prior_pair_ps,
            decode_curve_us=_curve(state),
            chunk=_chunk(live, fills_tokens),
            fills_tokens=fills_tokens,
        )

    def under(self, live: LiveConfig) -> Limits:
        """The same engine under another promise, until its state says what it makes of it."""
        chunk = _chunk(live, self.fills_tokens)
        return replace(self, inter_token_latency_us=live.slo.inter_token_latency_us, chunk=chunk)

    @property
    def pool_tokens(self) -> int:
        """The whole pool in tokens."""
        return self.total_blocks * self.block_tokens

    def unfit_reason(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request could never run, not even alone."""
        return unfit_reason(
            prompt_tokens, max_tokens, max_length_tokens=self.max_length_tokens, pool_tokens=self.pool_tokens
        )

    def decode_step_us(self, decodes: int) -> int:
        """A step that only decodes this many, between the measured points in a straight line."""
        if decodes <= 0:
            return self.fixed_us
        curve = self.decode_curve_us or ((max(1, self.max_sequences), self.fixed_us + self.decode_us),)
        if decodes >= curve[-1][0]:
            return curve[-1][1]
        low = (0, self.fixed_us)
        for point in curve:
            if decodes <= point[0]:
                return low[1] + (point[1] - low[1]) * (decodes - low[0]) // (point[0] - low[0])
            low = point
        return curve[-1][1]

    def chunk_tokens(self, decodes: int, depth_tokens: int = 0) -> int:
        """Prefill that one step carries beside this many decodes, so deep in its prompts: the engine's own rule.

        At least 1.

        A chunk that is set binds in every step. Else an engine that decodes nothing spends its whole budget, and one
        that decodes moves a block at least.
        """
        left = self.token_budget - decodes
        if self.chunk.prefill_chunk_tokens is not None:
            return max(1, min(left, self.chunk.prefill_chunk_tokens))
        if decodes <= 0:
            return max(1, left)
        room_us = self.inter_token_latency_us - self.decode_step_us(decodes)
        price_ns = self.per_prefill_token_ns + depth_tokens * self.per_prior_pair_ps // 1000
        by_cost = room_us * 1000 // max(1, price_ns)
        return max(1, min(left, max(self.block_tokens, by_cost)))

    def share_tokens(self, decodes: int, requests: int, depth_tokens: int = 0) -> int:
        """What this many requests together get of one step's prefill, while nobody else computes any."""
        chunk, most = self.chunk_tokens(decodes, depth_tokens), self.chunk.max_prefill_tokens_per_request
        return chunk if most is None else min(chunk, most * max(1, requests))

    def prior_pairs(self, computed_tokens: int, remaining_tokens: int, decodes: int) -> int:
        """Pairs of a prompt's remaining tokens with those that are computed before each one's step."""
        chunk = self.chunk_tokens(decodes, computed_tokens + remaining_tokens // 2)
        return remaining_tokens * computed_tokens + remaining_tokens * max(0, remaining_tokens - chunk) // 2

    def computing_us(self, prompt_tokens: int) -> int:
        """What so many prompt tokens add to the steps that carry them, wherever they stand in their prompts."""
        return prompt_tokens * self.per_prefill_token_ns // 1000

    def prefill_us(
        self, queue_tokens: int, own_tokens: int, decodes: int, *, own_requests: int = 1, prior_pairs: int = 0
    ) -> int:
        """Time until the own prefill is computed, behind a queue and beside this many decodes.

        Whenever the own requests get less than their share, the queue takes the rest of that step whole: so a step
        each chunk of queue and each share of one's own are enough. `prior_pairs`: of all this prefill.
        """
        tokens = queue_tokens + own_tokens
        depth = prior_pairs // max(1, tokens)
        chunk, share = self.chunk_tokens(decodes, depth), self.share_tokens(decodes, own_requests, depth)
        steps = -(-(queue_tokens * share + own_tokens * chunk) // (chunk * share))
        prefill_ns = tokens * self.per_prefill_token_ns + prior_pairs * self.per_prior_pair_ps // 1000
        return steps * self.decode_step_us(decodes) + prefill_ns // 1000


def _curve(state: EngineState) -> tuple[tuple[int, int], ...]:
    """The decode curve at the context of those inside: as they are on average, so many as decode.

    It is told for a half-full cache. Where many share one beginning, each attends to all of it: the context is then
    several times what the cache holds.
    """
    curve = tuple(sorted(state.decode_curve_us))
    if not state.requests or not state.decode_context_ps or state.pool is None:
        return curve
    context_tokens = sum(one.prompt_tokens + one.output_tokens for one in state.requests) / len(state.requests)
    told_tokens = state.pool.total_blocks * state.pool.block_tokens // 2
    price_us = state.decode_context_ps / 1_000_000
    return tuple((b, max(1, us + round(price_us * (b * context_tokens - told_tokens)))) for b, us in curve)


def _chunk(live: LiveConfig, fills_tokens: int | None) -> LiveSchedulingConfig:
    if fills_tokens is None or live.scheduling.prefill_chunk_tokens is not None:
        return live.scheduling
    return replace(live.scheduling, prefill_chunk_tokens=fills_tokens)


def prefill_share(limits: Limits, decodes: int, prefilling: int) -> int:
    """Tokens of each step's prefill that one of `prefilling` requests gets now."""
    return max(1, limits.share_tokens(decodes, prefilling) // max(1, prefilling))
