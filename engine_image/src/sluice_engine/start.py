"""A start, stage by stage: tokenizer, weights, step table, limits, scheduler, loop. The one place that wires them.

With `__main__` it is all that needs torch. It runs in the engine's thread, so that the server answers meanwhile.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable

from sluice_engine.calibrate import calibrate
from sluice_engine.codec import digest
from sluice_engine.config import EngineConfig, LiveConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derive import derive, prefill_cost, step_cost
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.state import LoadingProgress
from sluice_engine.core.steptime import StepTable
from sluice_engine.publication import LoadedEngine
from sluice_engine.runner import TorchRunner
from sluice_engine.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    live: LiveConfig,
    clock: Callable[[], int],
    progress: Callable[[LoadingProgress], None],
) -> LoadedEngine:
    """An engine that can run.

    Raises:
        ModelUnavailable: the model cannot be loaded.
        InvalidConfig: the configuration asks for what this machine or model does not have.
    """
    tokenizer = load_tokenizer(config.model.source)
    runner = TorchRunner.load(config, progress)
    progress(LoadingProgress(stage="step_table"))
    table, capacity = calibrate(runner, config, live, clock)
    derived, limits = derive(live.slo, config.scheduling, live.scheduling, table, capacity)
    if not derived.feasible:
        log.warning("promise infeasible", extra={"reason": derived.reason})
    beside = config.scheduling.max_sequences or 1
    per_request = min(live.slo.reference_prompt_tokens, capacity.max_length_tokens)
    context_tokens, depth = (min(capacity.pool_tokens, n * per_request) for n in (beside, 1))
    scheduler = Scheduler(
        limits,
        BlockPool(runner.num_blocks, runner.block_tokens),
        table,
        max_length_tokens=runner.max_length_tokens,
        max_preemptions_per_request=config.scheduling.max_preemptions_per_request,
    )
    # What a start leaves lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return LoadedEngine(
        loop=EngineLoop(scheduler, runner, clock),
        tokenizer=dataclasses.replace(tokenizer, token_bytes=_padded(tokenizer.token_bytes, runner.vocab_size)),
        derived=derived,
        step_cost=step_cost(
            table,
            beside=beside,
            chunk_tokens=derived.chunk_ceiling_tokens,
            context_tokens=context_tokens,
            start_tokens=depth,
        ),
        prefill_cost=prefill_cost(table, chunk_tokens=limits.prefill_budget(1, depth), start_tokens=depth),
        decode_curve_us=_decode_curve(table),
        table_digest=digest(table),
        vocab_size=runner.vocab_size,
        close=runner.close,
    )


def _decode_curve(table: StepTable) -> tuple[tuple[int, int], ...]:
    """Step times without prefill at the measured batches, in a half-full cache: what decoding requests wait for."""
    half = table.context_axis[-1] // 2
    return tuple((b, table.predict_us(b, 0, half)) for b in table.decode_axis if b)


def _padded(token_bytes: tuple[bytes, ...], vocab_size: int) -> tuple[bytes, ...]:
    """Models round their vocabulary up: ids beyond the tokenizer's can be sampled, and are no text."""
    return token_bytes + (b"",) * (vocab_size - len(token_bytes))
