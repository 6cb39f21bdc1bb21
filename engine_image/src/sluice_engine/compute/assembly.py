"""From a configuration to a runner that can execute: what is loaded, how much memory steps need, and the other ranks.

It knows no step. A GPU's pool takes what the largest step leaves, so steps are measured before there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sluice_engine.calibrate import PREFILL_AXIS
from sluice_engine.compute.device import free_memory_bytes
from sluice_engine.compute.graphs import recorder
from sluice_engine.compute.loading import Loaded, Opened, out_of_memory
from sluice_engine.compute.pool import NO_RESERVE, Reserve
from sluice_engine.compute.profile import largest_that_fits
from sluice_engine.compute.profile import reserve as measured_reserve
from sluice_engine.compute.ranks import Lost, Ranks
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import EngineConfig
from sluice_engine.core.loop import RunnerLost
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.shard import Shard

log = logging.getLogger(__name__)

# Of the cache over which steps are measured before there is a pool: few, and enough for a batch to read different ones.
PROFILE_BLOCKS = 64


def assemble_runner(
    config: EngineConfig,
    progress: Callable[[LoadingProgress], None],
    lost: Lost = lambda _code, _words: None,
) -> TorchRunner:
    """A runner ready to execute, and with `tensor_parallel` its other ranks.

    `lost` is told, in another thread, when one of those ends: a step may then wait for it for good.

    Raises:
        ModelUnavailable: missing, damaged, not supported, or too large for the memory.
        InvalidConfig: the device, type, length or cache that is asked for is not there.
    """
    opened = Opened.of(config, Shard(0, config.tensor_parallel))
    return _alone(opened, progress) if config.tensor_parallel == 1 else _first_of_several(opened, progress, lost)


def _alone(opened: Opened, progress: Callable[[LoadingProgress], None]) -> TorchRunner:
    loaded = opened.load(progress)
    progress(LoadingProgress(stage="warmup"))
    buckets = opened.buckets(loaded.model)
    largest, reserve = _profile(opened, loaded, buckets)
    # Again where steps were measured: libraries keep what they took for them.
    free_bytes = loaded.free_bytes if largest is None else free_memory_bytes(opened.device)
    runner = TorchRunner.of(opened, loaded, opened.pools(free_bytes, reserve))
    runner.largest_prefill_tokens = largest
    loaded.adapters.reserved_bytes = reserve.free_bytes
    if buckets:
        runner.record(buckets, recorder(opened.device))
    return runner


def _first_of_several(opened: Opened, progress: Callable[[LoadingProgress], None], lost: Lost) -> TorchRunner:
    ranks = Ranks(opened.config, lost)
    try:
        ranks.answers()
        loaded = opened.load(progress, ranks.store)
        free_bytes = min(loaded.free_bytes, *(free for (free,) in ranks.answers()))
        sizes = opened.pools(free_bytes)
        progress(LoadingProgress(stage="warmup"))
        ranks.tell(sizes)
        runner = TorchRunner.of(opened, loaded, sizes, ranks)
        runner.rank_bytes = (runner.memory_bytes, *(taken for (taken,) in ranks.answers()))
    except (RuntimeError, RunnerLost) as error:  # as of a group whose rank has died
        failure = ranks.failure()
        ranks.close()
        if failure is None:
            raise
        code, words = failure
        raise ModelUnavailable(words, code) from error
    except BaseException:
        ranks.close()
        raise
    log.info("ranks ready", extra={"ranks": len(runner.rank_bytes), "memory_bytes": list(runner.rank_bytes)})
    return runner


def _profile(opened: Opened, loaded: Loaded, buckets: tuple[int, ...]) -> tuple[int | None, Reserve]:
    """Prefill tokens of the largest step that fits on a GPU, and what it takes; a CPU's memory is not measured.

    Raises:
        ModelUnavailable: not even a small step fits.
    """
    if opened.device.type != "cuda":
        return None, NO_RESERVE
    runner = TorchRunner.of(opened, loaded, (PROFILE_BLOCKS, 0))
    decodes = opened.most_decodes

    def run(tokens: int) -> None:
        runner.measure(decodes, tokens, decodes)

    try:
        largest = largest_that_fits(run, min(PREFILL_AXIS[-1], opened.max_length_tokens))
        record = recorder(opened.device)  # one for all: they share its memory
        reserve = measured_reserve(
            lambda: run(largest),
            lambda size: runner.recorded((size,), record),
            buckets,
            opened.device,
        )
    except torch.OutOfMemoryError as error:
        raise out_of_memory(opened.path, error) from error
    log.info(
        "step memory measured",
        extra={"prefill_tokens": largest, "step_bytes": reserve.step_bytes, "graph_bytes": reserve.graph_bytes},
    )
    return largest, reserve
