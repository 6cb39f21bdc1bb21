"""A start, stage by stage: tokenizer, weights, step table, then the core (`core/assemble.py`) and its loop.

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
from sluice_engine.core.assemble import assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.state import LoadingProgress
from sluice_engine.executor import ThreadExecutor
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
    core = assemble(config, live, table, capacity)
    if not core.derived.feasible:
        log.warning("promise infeasible", extra={"reason": core.derived.reason})
    executor = ThreadExecutor(runner) if core.scheduler.depth else None
    # What a start leaves lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return LoadedEngine(
        loop=EngineLoop(core.scheduler, runner, clock, executor=executor),
        tokenizer=dataclasses.replace(tokenizer, token_bytes=_padded(tokenizer.token_bytes, runner.vocab_size)),
        derived=core.derived,
        step_cost=core.step_cost,
        prefill_cost=core.prefill_cost,
        decode_curve_us=core.decode_curve_us,
        table_digest=digest(table),
        vocab_size=runner.vocab_size,
        close=lambda: _close(executor, runner),
    )


def _close(executor: ThreadExecutor | None, runner: TorchRunner) -> None:
    if executor is not None:
        executor.close()
    runner.close()


def _padded(token_bytes: tuple[bytes, ...], vocab_size: int) -> tuple[bytes, ...]:
    """Models round their vocabulary up: ids beyond the tokenizer's can be sampled, and are no text."""
    return token_bytes + (b"",) * (vocab_size - len(token_bytes))
