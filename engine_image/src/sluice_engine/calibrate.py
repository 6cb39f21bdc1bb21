"""Fills the step-time table on the machine the engine runs on, or takes a kept one after checking a few of its cells.

Owns the choice of cells and the time spent; knows nothing of torch: it asks the runner for a synthetic step and reads
the time that came back.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from sluice_engine.codec import digest, from_json, to_json
from sluice_engine.config import EngineConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.plan import StepResult
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import Capacity, StepLimits
from sluice_engine.core.steptime import ChunkCeiling, StepTable
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import LiveConfig
from sluice_engine.watched import read_small

log = logging.getLogger(__name__)

# Two cores measure the demo model's grid about twice in this time; the start stays well below a minute.
BUDGET_US = 25_000_000
# The first round is always whole: this share of the budget bounds a single step, and with it the round.
LARGEST_STEP_IN_BUDGETS = 1 / 20
MIN_ROUNDS = 1
MAX_ROUNDS = 5

# Steps in which the host's own share of a step is timed: a few milliseconds in all.
OVERHEAD_STEPS = 16

# A kept cell that is off by more than this was measured on another machine, or beside another load.
KEPT_TOLERANCE = 0.35
# One look that agrees is enough. The first use of a shape pays for its kernels, and any look may meet another's work.
KEPT_LOOKS = 4

# A step this many times the inter-token promise teaches nothing that a promise could use.
LARGEST_STEP_IN_PROMISES = 2.5

DECODE_AXIS_CPU = (1, 4, 16, 64)
DECODE_AXIS_GPU = (1, 4, 16, 64, 256)
PREFILL_AXIS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# Deep enough that attention stands out of a step's noise, cheap enough for any model: the first look at depth.
FIRST_DEPTH_TOKENS = 1024

# Raised when a table that was kept before would mean something else.
_FORMAT = 2

_Cell = tuple[int, int, int, int]
"""Decode requests, prefill tokens, context tokens of the decodes, start of the chunk."""


class MeasuredRunner(Protocol):
    """What calibration asks of a runner."""

    num_blocks: int
    block_tokens: int
    max_length_tokens: int
    largest_prefill_tokens: int | None
    """What a step's memory was measured for; no larger step may be run. None: no bound."""
    description: str
    """Machine, model, data type, threads: a kept table is used again only where this agrees."""

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int = 0) -> int:
        """µs of one synthetic step: decodes that attend to `context_tokens` in all, and a chunk at `start_tokens`."""
        ...


def calibrate(
    runner: MeasuredRunner,
    config: EngineConfig,
    live: LiveConfig,
    clock: Callable[[], int],
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> tuple[StepTable, Capacity]:
    """The step-time table of this engine, and the capacity that limits may rest on.

    `progress` is told how many of the steps that have to be measured are done, and of how many.
    """
    path = kept_path(runner, config, live)
    table = _kept(runner, path)
    if table is None:
        table = _measure(runner, config, live, clock, progress)
        keep(table, path)
    return table, Capacity(
        num_blocks=runner.num_blocks,
        block_tokens=runner.block_tokens,
        max_length_tokens=runner.max_length_tokens,
        max_decode_requests=table.decode_axis[-1],
        max_prefill_tokens=table.prefill_axis[-1],
    )


def _measure(
    runner: MeasuredRunner,
    config: EngineConfig,
    live: LiveConfig,
    clock: Callable[[], int],
    progress: Callable[[int, int], None],
) -> StepTable:
    started = clock()
    longest_us = round(
        min(LARGEST_STEP_IN_PROMISES * live.slo.inter_token_latency_us, LARGEST_STEP_IN_BUDGETS * BUDGET_US)
    )
    decode_axis = _decode_axis(runner, config)
    prefill_axis = _prefill_axis(runner, live, longest_us)
    pool = runner.num_blocks * runner.block_tokens
    starts = _starts(runner, prefill_axis, longest_us)
    full = {d: min(pool, d * _longest_tokens(runner)) for d in decode_axis if d}
    cells: list[_Cell] = [(d, p, 0, 0) for d in decode_axis for p in prefill_axis if d or p]
    cells += [(d, 0, context, 0) for d, context in full.items()]
    cells += [(0, p, 0, start) for p, start in starts.items()]
    samples: dict[_Cell, list[int]] = {cell: [] for cell in cells}
    least = MIN_ROUNDS * len(cells)  # what is measured beyond it takes the time that is left
    for rounds in range(1, MAX_ROUNDS + 1):
        for number, (cell, times) in enumerate(samples.items(), start=(rounds - 1) * len(cells)):
            times.append(runner.measure(*cell))
            progress(min(number + 1, least), least)
        spent = clock() - started
        if rounds >= MIN_ROUNDS and spent + spent // rounds > BUDGET_US:
            break
    # Whatever else the machine did made a step longer, never shorter: of two, the shorter is nearer to the truth.
    medians = {cell: statistics.median_low(times) for cell, times in samples.items()}
    _lower_to_larger(medians, decode_axis, prefill_axis)
    # A step of nothing is never run: its cell is where the lines through the smallest measured steps meet.
    medians[0, 0, 0, 0] = _empty_step(medians, decode_axis, prefill_axis)
    log.info(
        "step table measured",
        extra={"cells": len(medians), "rounds": rounds, "seconds": round((clock() - started) / 1e6, 1)},
    )
    # A full cache costs the decodes the same whatever is prefilled beside them: attention's time is added.
    of_full_cache = {0: 0} | {
        d: max(0, medians[d, 0, context, 0] - medians[d, 0, 0, 0]) * pool // context for d, context in full.items()
    }
    table = StepTable(
        decode_axis=decode_axis,
        prefill_axis=prefill_axis,
        context_axis=(0, pool),
        median_us=tuple(
            medians[d, p, 0, 0] + extra for d in decode_axis for p in prefill_axis for extra in (0, of_full_cache[d])
        ),
        prior_pair_ps=_prior_pair_prices(medians, prefill_axis, starts),
        measured_on=runner.description,
    )
    return dataclasses.replace(table, host_overhead_us=_host_overhead_us(table, clock))


def _host_overhead_us(table: StepTable, clock: Callable[[], int]) -> int:
    """Median µs that planning and settling a step take beside the model, with the largest batch decoding."""
    batch = table.decode_axis[-1]
    limits = StepLimits(
        max_sequences=batch,
        token_budget=2 * batch,
        prefill_chunk_tokens=batch,
        max_prefill_tokens_per_request=None,
        ceiling=ChunkCeiling(table, 0),
        block_tokens=OVERHEAD_STEPS,
    )
    pool = BlockPool(2 * batch, limits.block_tokens)
    scheduler = Scheduler(limits, pool, table, max_length_tokens=2 * OVERHEAD_STEPS)
    sampling = SamplingParams(max_tokens=OVERHEAD_STEPS)
    for number in range(batch):
        scheduler.add(Request(str(number), [0], 1, sampling, arrival_us=number))
    times = []
    while scheduler.has_work:
        begun = clock()
        plan = scheduler.schedule(begun)
        scheduler.update(StepResult(plan.step, np.zeros(plan.num_sampling, dtype=np.int64)), begun)
        times.append(clock() - begun)
    return round(statistics.median(times))


def _decode_axis(runner: MeasuredRunner, config: EngineConfig) -> tuple[int, ...]:
    wanted = DECODE_AXIS_GPU if config.accelerator_count else DECODE_AXIS_CPU
    most = config.scheduling.max_sequences or wanted[-1]
    most = min(most, runner.num_blocks)
    return (0, *(b for b in wanted if b < most), most)


def _longest_tokens(runner: MeasuredRunner) -> int:
    """Tokens of the longest request."""
    return min(runner.num_blocks * runner.block_tokens, runner.max_length_tokens)


def _prefill_axis(runner: MeasuredRunner, live: LiveConfig, longest_us: int) -> tuple[int, ...]:
    """Sizes up to the largest that a promise could allow; what is set is always among them."""
    limit = min(_longest_tokens(runner), runner.largest_prefill_tokens or _longest_tokens(runner))
    axis = [0]
    took_us = 0
    for tokens in PREFILL_AXIS:
        # Twice the longest would be waste, and the size before it was over half of the longest then.
        if tokens > limit or took_us * tokens > 2 * longest_us * max(1, axis[-1]):
            break
        axis.append(tokens)
        runner.measure(0, tokens, 0)  # the first use of a shape pays for its kernels
        took_us = runner.measure(0, tokens, 0)
        if took_us > longest_us:
            break
    chunk = live.scheduling.prefill_chunk_tokens
    if chunk is not None and chunk <= limit:
        axis = sorted({*axis, chunk})
    if len(axis) == 1:
        axis.append(limit)
    return tuple(axis)


def _starts(runner: MeasuredRunner, prefill_axis: tuple[int, ...], longest_us: int) -> dict[int, int]:
    """How deep a chunk of each prefill size is measured: as deep as the model goes, if that is not too long a step.

    Sizes for which hardly any depth is left take the price of the size before them.
    """
    limit = _longest_tokens(runner)
    starts: dict[int, int] = {}
    price_us = 0.0
    for tokens in prefill_axis[1:]:
        deepest = limit - tokens
        if deepest < runner.block_tokens:
            break
        start = min(deepest, FIRST_DEPTH_TOKENS)
        took_us = runner.measure(0, tokens, 0)
        if starts and price_us:
            start = min(deepest, int((longest_us - took_us) / (price_us * tokens)))
            if start < runner.block_tokens:
                break
        price_us = max(0, runner.measure(0, tokens, 0, start) - took_us) / (tokens * start)
        if price_us and not starts:
            start = max(start, min(deepest, int((longest_us - took_us) / (price_us * tokens))))
        starts[tokens] = start
    return starts


def _lower_to_larger(medians: dict[_Cell, int], decode_axis: tuple[int, ...], prefill_axis: tuple[int, ...]) -> None:
    """A step costs no more than one with more in it: where it was measured so, something else ran meanwhile."""
    for at_d, d in reversed(list(enumerate(decode_axis))):
        for at_p, p in reversed(list(enumerate(prefill_axis))):
            larger = [(more, p, 0, 0) for more in decode_axis[at_d + 1 : at_d + 2]]
            larger += [(d, more, 0, 0) for more in prefill_axis[at_p + 1 : at_p + 2]]
            if d or p:
                medians[d, p, 0, 0] = min(medians[cell] for cell in [(d, p, 0, 0), *larger])


def _prior_pair_prices(
    medians: dict[_Cell, int], prefill_axis: tuple[int, ...], starts: dict[int, int]
) -> tuple[int, ...]:
    """Picoseconds per prior pair at each point of the prefill axis."""
    prices: list[int] = []
    for tokens in prefill_axis[1:]:
        if tokens in starts:
            start = starts[tokens]
            extra_us = medians[0, tokens, 0, start] - medians[0, tokens, 0, 0]
            prices.append(max(0, extra_us * 1_000_000 // (tokens * start)))
        else:
            prices.append(prices[-1] if prices else 0)
    return (prices[0], *prices)


def _empty_step(medians: dict[_Cell, int], decode_axis: tuple[int, ...], prefill_axis: tuple[int, ...]) -> int:
    first, second = prefill_axis[1], prefill_axis[min(2, len(prefill_axis) - 1)]
    low, high = medians[0, first, 0, 0], medians[0, second, 0, 0]
    by_prefill = low - (high - low) * first // (second - first) if second > first else low
    return max(0, min(by_prefill, low, medians[decode_axis[1], 0, 0, 0]))


def kept_path(runner: MeasuredRunner, config: EngineConfig, live: LiveConfig) -> Path:
    """Where the table of this engine on this machine is kept."""
    key = (
        _FORMAT,
        runner.description,
        config.scheduling.max_sequences,
        live.scheduling.prefill_chunk_tokens,
        live.slo.inter_token_latency_us,
        runner.num_blocks,
        runner.block_tokens,
    )
    return Path(config.table_dir) / f"step-table-{digest(list(key))}.json"


def _kept(runner: MeasuredRunner, path: Path) -> StepTable | None:
    try:
        table = from_json(StepTable, read_small(path), path.name)
    except FileNotFoundError:
        return None
    except (OSError, InvalidConfig, ValueError) as error:
        log.warning("kept step table ignored", extra={"path": str(path), "error": str(error)})
        return None
    if table.measured_on != runner.description:
        return None
    for cell in _checked(table, _longest_tokens(runner)):
        d, p, context, start = cell
        kept = table.predict_us(d, p, context, p * start)
        seen = []
        for _ in range(KEPT_LOOKS):
            seen.append(runner.measure(*cell))
            if abs(seen[-1] - kept) <= KEPT_TOLERANCE * kept:
                break
        else:
            log.info("kept step table is out of date", extra={"cell": str(cell), "kept_us": kept, "now_us": min(seen)})
            return None
    log.info("kept step table taken", extra={"path": str(path)})
    return table


def _checked(table: StepTable, longest_tokens: int) -> tuple[_Cell, ...]:
    """Cells that tell whether a kept table is true: the corners that limits rest on, and a deep chunk."""
    decodes, prefill = table.decode_axis[-1], table.prefill_axis
    deep = (0, prefill[1], 0, max(0, min(FIRST_DEPTH_TOKENS, longest_tokens - prefill[1])))
    return (1, 0, 0, 0), (decodes, 0, 0, 0), (decodes, prefill[len(prefill) // 2], 0, 0), (0, prefill[-1], 0, 0), deep


def keep(table: StepTable, path: Path) -> None:
    """Keep the table for the next start; a folder that is not there or not writable costs nothing but that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(to_json(table))
        partial.replace(path)
    except OSError as error:
        log.info("step table not kept", extra={"path": str(path), "error": str(error)})
