"""An engine's core from its two files, its step times and its capacity: the one place that wires them.

`sluice_engine.start` calls it once the machine was measured, the simulator with the times it is given: so both run the
same scheduler under the same limits. What is built here needs no device; the loop's runner and clock come from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.config import EngineConfig, LiveConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derive import Capacity, derive, prefill_cost, step_cost
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.state import DerivedLimits, PrefillCost, StepCost
from sluice_engine.core.steptime import StepTable, StepTimes

# Where step times come from no table: decode batches at which the curve is told.
_CURVE = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine without a device, and what it tells of itself."""

    scheduler: Scheduler
    derived: DerivedLimits
    step_cost: StepCost
    prefill_cost: PrefillCost
    decode_curve_us: tuple[tuple[int, int], ...]
    """(decode batch, µs of a step that only decodes)."""


def assemble(config: EngineConfig, live: LiveConfig, times: StepTimes, capacity: Capacity) -> Assembled:
    """The scheduler that obeys both files on this machine."""
    derived, limits = derive(live.slo, config.scheduling, live.scheduling, times, capacity)
    beside = config.scheduling.max_sequences or 1
    per_request = min(live.slo.reference_prompt_tokens, capacity.max_length_tokens)
    context_tokens, depth = (min(capacity.pool_tokens, n * per_request) for n in (beside, 1))
    return Assembled(
        scheduler=Scheduler(
            limits,
            BlockPool(capacity.num_blocks, capacity.block_tokens),
            times,
            max_length_tokens=capacity.max_length_tokens,
            policies=Policies.of(config, live),
            depth=_overlap_depth(config),
        ),
        derived=derived,
        step_cost=step_cost(
            times,
            beside=beside,
            chunk_tokens=derived.chunk_ceiling_tokens,
            context_tokens=context_tokens,
            start_tokens=depth,
        ),
        prefill_cost=prefill_cost(times, chunk_tokens=limits.prefill_budget(1, depth), start_tokens=depth),
        decode_curve_us=_decode_curve(times, capacity),
    )


def _overlap_depth(config: EngineConfig) -> int:
    depth = config.scheduling.overlap_depth
    return (1 if config.accelerator_count else 0) if depth is None else depth


def _decode_curve(times: StepTimes, capacity: Capacity) -> tuple[tuple[int, int], ...]:
    """Step times without prefill at the measured batches, in a half-full cache: what decoding requests wait for."""
    if isinstance(times, StepTable):
        axis, half = times.decode_axis[1:], times.context_axis[-1] // 2
    else:
        axis, half = tuple(b for b in _CURVE if b <= capacity.max_decode_requests), capacity.pool_tokens // 2
    return tuple((b, times.predict_us(b, 0, half)) for b in axis)
