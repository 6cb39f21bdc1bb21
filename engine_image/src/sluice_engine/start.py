"""A start, stage by stage: tokenizer, weights, step table, then the core (`core/assemble.py`) and its loop.

With `__main__` it is all that needs torch. It runs in the engine's thread, so that the server answers meanwhile.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from pathlib import Path

from sluice_engine.calibrate import calibrate, keep, kept_path
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.ranks import Lost
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import EngineConfig, ModelSource
from sluice_engine.core.assemble import assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.state import LoadingProgress
from sluice_engine.core.tuning import Tuning
from sluice_engine.executor import ThreadExecutor
from sluice_engine.live_config import LiveConfig
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    live: LiveConfig,
    clock: Callable[[], int],
    progress: Callable[[LoadingProgress], None],
    lost: Lost,
) -> LoadedEngine:
    """An engine that can run; `lost` is told, in any thread, when a part of it has ended for good.

    Raises:
        ModelUnavailable: the model cannot be loaded.
        InvalidConfig: the configuration asks for what this machine or model does not have.
    """
    config, revision = _with_files(config, progress)
    tokenizer = load_tokenizer(config.model.source)
    tools = tokenizer.tools
    log.info("chat template", extra={"tools": tools if isinstance(tools, str) else tools.form.family})
    runner = assemble_runner(config, progress, lost)
    progress(LoadingProgress(stage="step_table"))

    def measured(done: int, of: int) -> None:
        progress(LoadingProgress(stage="step_table", steps_done=done, steps_total=of))

    table, capacity = calibrate(runner, config, live, clock, measured)
    link = runner.measure_link()
    prompt = tokenizer.encode("Hello", add_special=True) or [0]
    first = runner.first_token([min(token, runner.vocab_size - 1) for token in prompt])
    log.info("first token", extra={"after": "Hello", "token_id": first})
    core = assemble(config, live, table, capacity, num_host_blocks=runner.num_host_blocks, link=link)
    derived = core.tuning.current.derived
    if not derived.feasible:
        log.warning("promise infeasible", extra={"reason": derived.reason})
    executor = ThreadExecutor(runner) if core.scheduler.depth else None
    # What a start leaves lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return LoadedEngine(
        loop=EngineLoop(core.scheduler, runner, clock, executor=executor, tuning=core.tuning),
        tuning=core.tuning,
        tokenizer=dataclasses.replace(tokenizer, token_bytes=_padded(tokenizer.token_bytes, runner.vocab_size)),
        vocab_size=runner.vocab_size,
        rank_bytes=runner.rank_bytes,
        model_revision=revision,
        adapters=runner.adapters,
        keep=_Keeper(core.tuning, kept_path(runner, config, live)),
        close=lambda: _close(executor, runner),
    )


def _with_files(config: EngineConfig, progress: Callable[[LoadingProgress], None]) -> tuple[EngineConfig, str]:
    """The same with a model that is on this disk, and the commit that it is; a hub's is downloaded first."""
    hub = config.model.source.hub
    if hub is None:
        return config, ""
    from sluice_engine.model_files.hub import fetch  # noqa: PLC0415  # its library reads the environment, and is needed by few

    fetched = fetch(hub, progress)
    log.info("model fetched", extra={"repository": hub.repository, "commit": fetched.commit})
    source = ModelSource(path=str(fetched.path))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, source=source)), fetched.commit


class _Keeper:
    """Writes the step table, if it has changed since."""

    def __init__(self, tuning: Tuning, path: Path) -> None:
        self._tuning = tuning
        self._path = path
        self._kept = tuning.table

    def __call__(self) -> None:
        table = self._tuning.table
        if table is not None and table is not self._kept:
            keep(table, self._path)
            self._kept = table


def _close(executor: ThreadExecutor | None, runner: TorchRunner) -> None:
    if executor is not None:
        executor.close()
    runner.close()


def _padded(token_bytes: tuple[bytes, ...], vocab_size: int) -> tuple[bytes, ...]:
    """Models round their vocabulary up: ids beyond the tokenizer's can be sampled, and are no text."""
    return token_bytes + (b"",) * (vocab_size - len(token_bytes))
