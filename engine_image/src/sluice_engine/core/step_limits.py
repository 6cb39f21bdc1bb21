"""From a promise and step times to limits: prefill chunk, token budget, running requests.

The engine derives, others report. A set value is obeyed or refused with the reason, never bent. When nothing works the
engine still serves, at the least chunk that makes progress, and says which promise would work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice_engine.config import SchedulerConfig
from sluice_engine.core.fit import chunks_of
from sluice_engine.core.state import DerivedLimits, PrefillCost, StepCost
from sluice_engine.core.steptime import ChunkCeiling, StepTimes
from sluice_engine.live_config import LiveSchedulingConfig, SLOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the model and its memory hold."""

    num_blocks: int
    block_tokens: int
    max_length_tokens: int
    max_decode_requests: int
    """Largest decode batch that was measured; limits never rest on more."""
    max_prefill_tokens: int
    """Largest prefill sum that was measured."""

    @property
    def pool_tokens(self) -> int:
        """Tokens of the whole pool."""
        return self.num_blocks * self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The bounds of one step, as the scheduler obeys them."""

    max_sequences: int
    token_budget: int
    prefill_chunk_tokens: int | None
    """Set by the user: binds in every step. None: c(b) of the step's own b."""
    max_prefill_tokens_per_request: int | None
    ceiling: ChunkCeiling
    block_tokens: int

    def prefill_budget(self, decode_requests: int, context_tokens: int) -> int:
        """Most prefill tokens of a step beside these decodes, all of them at the start of their prompts."""
        left = self.token_budget - decode_requests
        if self.prefill_chunk_tokens is not None:
            return max(0, min(left, self.prefill_chunk_tokens))
        if decode_requests == 0:
            return left
        # One block at least: where even that breaks the promise, a full batch of decodes must not lock prefill out.
        return max(0, min(left, max(self.ceiling(decode_requests, context_tokens), self.block_tokens)))

    def chunk_share(
        self, decode_requests: int, context_tokens: int, start_tokens: int, prefill_tokens: int, prior_pairs: int
    ) -> int:
        """Most tokens of one more chunk that starts at `start_tokens`, beside what the step prefills already.

        It is `prefill_budget` seen from a depth: only where the engine derives the chunk, and something decodes, is a
        deep chunk smaller for it.
        """
        if self.prefill_chunk_tokens is not None or decode_requests == 0:
            return self.token_budget
        more = self.ceiling.beside(decode_requests, context_tokens, start_tokens, prefill_tokens, prior_pairs)
        return max(more, self.block_tokens - prefill_tokens)


def derive(
    slo: SLOConfig,
    scheduling: SchedulerConfig,
    chunk: LiveSchedulingConfig,
    times: StepTimes,
    capacity: Capacity,
) -> tuple[DerivedLimits, StepLimits]:
    """The limits that keep `slo`, or the least promise that would work."""
    promise = slo.inter_token_latency_us
    ceiling = ChunkCeiling(times, promise, search_up_to_tokens=capacity.max_prefill_tokens)
    per_request = min(slo.reference_prompt_tokens, capacity.max_length_tokens)
    # A promise that holds for prompts of this length holds for their last chunk.
    depth = min(per_request, capacity.pool_tokens)

    def context(b: int) -> int:
        return min(capacity.pool_tokens, b * per_request)

    def c(b: int) -> int:
        return ceiling(b, context(b), depth)

    most = min(capacity.num_blocks, capacity.max_decode_requests)
    if scheduling.token_budget is not None:
        # A budget that decodes use up alone would shut prefill out.
        most = max(1, min(most, scheduling.token_budget - 1))
    block, reason, least_itl = capacity.block_tokens, "", 0
    set_chunk, set_sequences = chunk.prefill_chunk_tokens, scheduling.max_sequences
    if set_chunk is None and set_sequences is None:
        needed = max(block, c(1) // 4)
        sequences = _largest(most, lambda b: c(b) >= needed)
    elif set_sequences is None:
        needed = set_chunk or block
        sequences = _largest(most, lambda b: c(b) >= needed)
    else:
        needed = set_chunk or block
        sequences = set_sequences if c(set_sequences) >= needed else 0
    if sequences == 0:
        beside = set_sequences or 1
        least_itl = times.bound_us(beside, needed, context(beside), needed * depth)
        what = f"a prefill chunk of {needed} tokens" if set_chunk else f"one block of prefill ({needed} tokens)"
        reason = (
            f"a step with {what} beside {_decodes(beside)} takes {_ms(least_itl)}, "
            f"the inter-token promise is {_ms(promise)}; the least that would work is {_ms(least_itl)}"
        )
        sequences = set_sequences or 1
    largest_chunk = set_chunk if set_chunk is not None else max(c(1), block)
    budget = scheduling.token_budget
    if budget is None:
        budget = (
            sequences + set_chunk
            if set_chunk is not None
            else max(b + max(ceiling(b, context(b)), block) for b in _samples(sequences))
        )
    elif not reason and set_sequences is not None and budget <= set_sequences and set_sequences > 1:
        reason = f"tokenBudget {budget} leaves no prefill beside {sequences} decodes; raise it above {sequences}"
    limits = StepLimits(
        max_sequences=sequences,
        token_budget=budget,
        prefill_chunk_tokens=set_chunk,
        max_prefill_tokens_per_request=chunk.max_prefill_tokens_per_request,
        ceiling=ceiling,
        block_tokens=block,
    )
    alone = idle_ttft_us(depth, limits, times)
    promised = slo.ttft_promise_us(depth)
    least_ttft = 0
    if alone > promised:
        least_ttft = alone
        ttft_reason = (
            f"an idle pod needs {_ms(alone)} for the first token of a {depth}-token prompt, "
            f"the promise is {_ms(promised)}; the least that would work is {_ms(alone)}"
        )
        reason = f"{reason}; {ttft_reason}" if reason else ttft_reason
    derived = DerivedLimits(
        feasible=not reason,
        reason=reason,
        least_inter_token_latency_us=least_itl,
        least_time_to_first_token_us=least_ttft,
        chunk_ceiling_tokens=max(1, min(largest_chunk, budget - 1)),
        token_budget=budget,
        max_sequences=sequences,
        kv_capacity_tokens=capacity.pool_tokens,
    )
    return derived, limits


def idle_ttft_us(prompt_tokens: int, limits: StepLimits, times: StepTimes) -> int:
    """Time until the first token of a prompt in a pod that does nothing else: the sum of its prefill steps."""
    per_step = limits.prefill_budget(0, 0)
    if limits.max_prefill_tokens_per_request is not None:
        per_step = min(per_step, limits.max_prefill_tokens_per_request)
    return sum(times.bound_us(0, tokens, 0, tokens * start) for tokens, start in chunks_of(prompt_tokens, per_step))


def step_cost(
    times: StepTimes, *, beside: int, chunk_tokens: int, context_tokens: int, start_tokens: int = 0
) -> StepCost:
    """Three integers whose sum reproduces the ceiling at this promise, rounded up: what CEL can compute with.

    The price of a prefill token is the secant from no prefill to a chunk of `chunk_tokens` at `start_tokens`, so that
    the line meets the curve exactly where the promise binds.
    """
    floor = times.bound_us(beside, 0, context_tokens)
    reach = max(1, chunk_tokens)
    pairs = reach * start_tokens
    slope_ns = max(0, -(-(times.bound_us(beside, reach, context_tokens, pairs) - floor) * 1000 // reach))
    intercept = times.bound_us(0, reach, 0, pairs) - reach * slope_ns // 1000
    fixed = min(max(0, intercept), floor)
    return StepCost(fixed_us=fixed, decode_us=floor - fixed, per_prefill_token_ns=slope_ns)


def prefill_cost(times: StepTimes, *, chunk_tokens: int, start_tokens: int) -> PrefillCost:
    """What a prefill token costs at the start of a prompt, and what each token before it adds."""
    reach = max(1, chunk_tokens)
    empty, shallow = times.bound_us(1, 0, 0), times.bound_us(1, reach, 0)
    pairs = reach * max(1, start_tokens)
    deep = times.bound_us(1, reach, 0, pairs)
    return PrefillCost(
        per_token_ns=max(0, -(-(shallow - empty) * 1000 // reach)),
        per_prior_pair_ps=max(0, (deep - shallow) * 1_000_000 // pairs),
    )


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest b in 1..most for which `holds(b)`, taking it to fall with b; 0 when it never does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _samples(sequences: int) -> list[int]:
    """Decode batches that decide the largest b + c(b): a step-time table bends only at its own points."""
    return sorted({1, sequences, *(b for b in (2**i for i in range(1, 16)) if b < sequences)})


def _decodes(b: int) -> str:
    return "1 decode" if b == 1 else f"{b} decodes"


def _ms(us: int) -> str:
    return f"{-(-us // 1000):,} ms"
