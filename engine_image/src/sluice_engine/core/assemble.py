"""An engine's core from its two files, its step times and its capacity: the one place that wires them.

`sluice_engine.start` calls it once the machine was measured, the simulator with the times it is given: so both run the
same scheduler under the same limits. What is built here needs no device; the loop's runner and clock come from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.config import EngineConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derivation import Derivation, derivation_of, most_sequences
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.refine import RefinedTable
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import Capacity
from sluice_engine.core.steptime import StepTable, StepTimes
from sluice_engine.core.suspension import SwapSpace
from sluice_engine.core.tuning import Tuning
from sluice_engine.live_config import LiveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine without a device."""

    scheduler: Scheduler
    tuning: Tuning
    """What it tells of itself, kept true by the steps that run."""


def assemble(
    config: EngineConfig,
    live: LiveConfig,
    times: StepTimes,
    capacity: Capacity,
    *,
    num_host_blocks: int = 0,
    link: Link | None = None,
) -> Assembled:
    """The scheduler that obeys both files on this machine. A table goes on learning; other step times stay.

    `num_host_blocks`: what fits into `cache.host_swap_bytes`; `link`: the way there, as measured.
    """
    if isinstance(times, StepTable):
        times = RefinedTable(times, live.slo.target_percent, live.slo.inter_token_latency_us)

    def derive(live: LiveConfig, promise_percent: int) -> Derivation:
        return derivation_of(config, live, times, capacity, promise_percent=promise_percent)

    current = derive(live, 100)
    speculation = config.scheduling.speculation
    pool = BlockPool(capacity.num_blocks, capacity.block_tokens)
    scheduler = Scheduler(
        current.limits,
        pool,
        times,
        max_length_tokens=capacity.max_length_tokens,
        policies=Policies.of(config, live),
        prefix=PrefixCache(pool, enabled=config.cache.prefix_caching == "Enabled"),
        space=SwapSpace(HostPool(num_host_blocks, pool.block_tokens), link) if link is not None else None,
        num_slots=max(most_sequences(config, capacity), current.limits.max_sequences),
        depth=_overlap_depth(config),
        most_drafts=speculation.draft_tokens if speculation.method == "PromptLookup" else 0,
        budgets={
            "adapters": config.adapters.max_running,
            **({"draft_tokens": speculation.draft_budget} if speculation.draft_budget is not None else {}),
        },
        strict=False,
    )
    return Assembled(scheduler=scheduler, tuning=Tuning(scheduler, live, current, derive))


def _overlap_depth(config: EngineConfig) -> int:
    depth = config.scheduling.overlap_depth
    return (1 if config.accelerator_count else 0) if depth is None else depth
