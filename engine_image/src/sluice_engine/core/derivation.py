"""All that an engine tells of itself once its step times are known: limits, costs, and the curve of its decodes.

Made at start, and again when the step times have moved. Pure; start reading at `derivation_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice_engine.config import EngineConfig
from sluice_engine.core.state import DerivedLimits, PrefillCost, StepCost
from sluice_engine.core.step_limits import Capacity, StepLimits, derive, prefill_cost, step_cost
from sluice_engine.core.steptime import StepTimes
from sluice_engine.live_config import LiveConfig

# Decode batches at which the curve is told, as far as the engine goes.
_CURVE = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """What follows from a promise and step times."""

    derived: DerivedLimits
    limits: StepLimits
    step_cost: StepCost
    prefill_cost: PrefillCost
    decode_curve_us: tuple[tuple[int, int], ...]
    """(decode batch, µs of a step that only decodes, in a half-full cache): what a gate predicts gaps with."""
    decode_context_ps: int
    """What each token of context adds to it."""


def derivation_of(
    config: EngineConfig, live: LiveConfig, times: StepTimes, capacity: Capacity, *, promise_percent: int = 100
) -> Derivation:
    """What follows from both files on this machine; `promise_percent` relaxes or tightens the promise."""
    slo = replace(
        live.slo,
        inter_token_latency_us=live.slo.inter_token_latency_us * promise_percent // 100,
        time_to_first_token_us=live.slo.time_to_first_token_us * promise_percent // 100,
    )
    derived, limits = derive(slo, config.scheduling, live.scheduling, times, capacity)
    beside = config.scheduling.max_sequences or 1
    per_request = min(slo.reference_prompt_tokens, capacity.max_length_tokens)
    context_tokens, depth = (min(capacity.pool_tokens, n * per_request) for n in (beside, 1))
    return Derivation(
        derived=derived,
        limits=limits,
        step_cost=step_cost(
            times,
            beside=beside,
            chunk_tokens=derived.chunk_ceiling_tokens,
            context_tokens=context_tokens,
            start_tokens=depth,
        ),
        prefill_cost=prefill_cost(times, chunk_tokens=limits.prefill_budget(1, depth), start_tokens=depth),
        decode_curve_us=_decode_curve(times, capacity),
        decode_context_ps=_decode_context_ps(times, capacity),
    )


def most_sequences(config: EngineConfig, capacity: Capacity) -> int:
    """Requests that may ever run at once, however fast the steps turn out to be."""
    return config.scheduling.max_sequences or min(capacity.num_blocks, capacity.max_decode_requests)


def _decode_curve(times: StepTimes, capacity: Capacity) -> tuple[tuple[int, int], ...]:
    """Step times without prefill in a half-full cache: what decoding requests wait for."""
    most = capacity.max_decode_requests
    return tuple(
        (b, times.predict_us(b, 0, capacity.pool_tokens // 2)) for b in (*(b for b in _CURVE if b < most), most)
    )


def _decode_context_ps(times: StepTimes, capacity: Capacity) -> int:
    """What a token of context adds to the largest batch: of an empty cache and a full one the difference."""
    most, full = capacity.max_decode_requests, capacity.pool_tokens
    return max(0, times.predict_us(most, 0, full) - times.predict_us(most, 0, 0)) * 1_000_000 // max(1, full)
