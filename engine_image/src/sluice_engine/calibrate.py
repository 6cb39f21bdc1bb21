"""Fills the step-time table on the machine the engine runs on, or takes a kept one after checking a few of its cells.

Owns the choice of cells and the time spent; knows nothing of torch: it asks the runner for a synthetic step and reads
the time that came back.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from sluice_engine.codec import digest, from_json, to_json
from sluice_engine.config import EngineConfig, LiveConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derive import Capacity, StepLimits
from sluice_engine.core.plan import SampledToken, StepResult
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import ChunkCeiling, StepTable
from sluice_engine.errors import InvalidConfig

log = logging.getLogger(__name__)

# Two cores measure the demo model's grid about twice in this time; the start stays well below a minute.
BUDGET_US = 25_000_000
MIN_ROUNDS = 1
MAX_ROUNDS = 5

# Steps in which the host's own share of a step is timed: a few milliseconds in all.
OVERHEAD_STEPS = 16

# A kept cell that is off by more than this was measured on another machine, or beside another load.
KEPT_TOLERANCE = 0.35

# A step this many times the inter-token promise teaches nothing that a promise could use.
LARGEST_STEP_IN_PROMISES = 2.5

DECODE_AXIS_CPU = (1, 4, 16, 64)
DECODE_AXIS_GPU = (1, 4, 16, 64, 256)
PREFILL_AXIS = (16, 64, 256, 1024, 4096, 16_384)


class MeasuredRunner(Protocol):
    """What calibration asks of a runner."""

    num_blocks: int
    block_tokens: int
    max_length_tokens: int
    description: str
    """Machine, model, data type, threads: a kept table is used again only where this agrees."""

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int) -> int:
        """µs of one synthetic step whose batch attends to `context_tokens` KV tokens in all."""
        ...


def calibrate(
    runner: MeasuredRunner, config: EngineConfig, live: LiveConfig, clock: Callable[[], int]
) -> tuple[StepTable, Capacity]:
    """The step-time table of this engine, and the capacity that limits may rest on."""
    path = _kept_path(runner, config, live)
    table = _kept(runner, path)
    if table is None:
        table = _measure(runner, config, live, clock)
        _keep(table, path)
    return table, Capacity(
        num_blocks=runner.num_blocks,
        block_tokens=runner.block_tokens,
        max_length_tokens=runner.max_length_tokens,
        max_decode_requests=table.decode_axis[-1],
        max_prefill_tokens=table.prefill_axis[-1],
    )


def _measure(runner: MeasuredRunner, config: EngineConfig, live: LiveConfig, clock: Callable[[], int]) -> StepTable:
    started = clock()
    decode_axis = _decode_axis(runner, config)
    prefill_axis = _prefill_axis(runner, live)
    context_axis = (0, runner.num_blocks * runner.block_tokens)
    cells = list(_grid(decode_axis, prefill_axis, context_axis))
    samples: dict[tuple[int, int, int], list[int]] = {cell: [] for cell in cells if cell[0] or cell[1]}
    for rounds in range(1, MAX_ROUNDS + 1):
        for cell, times in samples.items():
            times.append(runner.measure(*cell))
        spent = clock() - started
        if rounds >= MIN_ROUNDS and spent + spent // rounds > BUDGET_US:
            break
    medians = {cell: round(statistics.median(times)) for cell, times in samples.items()}
    for context in context_axis:
        # A step of nothing is never run: its cell is where the lines through the smallest measured steps meet.
        medians[0, 0, context] = _empty_step(medians, decode_axis, prefill_axis, context)
    log.info(
        "step table measured",
        extra={"cells": len(medians), "rounds": rounds, "seconds": round((clock() - started) / 1e6, 1)},
    )
    table = StepTable(
        decode_axis=decode_axis,
        prefill_axis=prefill_axis,
        context_axis=context_axis,
        median_us=tuple(medians[cell] for cell in cells),
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
        tokens = tuple(SampledToken(entry.request.id, entry.incarnation, 0) for entry in plan.scheduled)
        scheduler.update(plan, StepResult(plan.step, tokens))
        times.append(clock() - begun)
    return round(statistics.median(times))


def _decode_axis(runner: MeasuredRunner, config: EngineConfig) -> tuple[int, ...]:
    wanted = DECODE_AXIS_GPU if config.accelerator_count else DECODE_AXIS_CPU
    most = config.scheduling.max_sequences or wanted[-1]
    most = min(most, runner.num_blocks)
    return (0, *(b for b in wanted if b < most), most)


def _prefill_axis(runner: MeasuredRunner, live: LiveConfig) -> tuple[int, ...]:
    """Sizes up to the largest that a promise could allow; what is set is always among them."""
    limit = min(runner.num_blocks * runner.block_tokens, runner.max_length_tokens)
    longest_us = LARGEST_STEP_IN_PROMISES * live.slo.inter_token_latency_us
    axis = [0]
    for tokens in PREFILL_AXIS:
        if tokens > limit:
            break
        axis.append(tokens)
        runner.measure(0, tokens, tokens)  # the first use of a shape pays for its kernels
        if runner.measure(0, tokens, tokens) > longest_us:
            break
    chunk = live.scheduling.prefill_chunk_tokens
    if chunk is not None and chunk <= limit:
        axis = sorted({*axis, chunk})
    if len(axis) == 1:
        axis.append(limit)
    return tuple(axis)


def _grid(*axes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    decodes, prefills, contexts = axes
    return ((d, p, c) for d in decodes for p in prefills for c in contexts)


def _empty_step(
    medians: dict[tuple[int, int, int], int], decode_axis: tuple[int, ...], prefill_axis: tuple[int, ...], context: int
) -> int:
    first, second = prefill_axis[1], prefill_axis[min(2, len(prefill_axis) - 1)]
    low, high = medians[0, first, context], medians[0, second, context]
    by_prefill = low - (high - low) * first // (second - first) if second > first else low
    return max(0, min(by_prefill, low, medians[decode_axis[1], 0, context]))


def _kept_path(runner: MeasuredRunner, config: EngineConfig, live: LiveConfig) -> Path:
    key = (
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
        table = from_json(StepTable, path.read_bytes(), path.name)
    except FileNotFoundError:
        return None
    except (OSError, InvalidConfig, ValueError) as error:
        log.warning("kept step table ignored", extra={"path": str(path), "error": str(error)})
        return None
    if table.measured_on != runner.description:
        return None
    top = (table.decode_axis[-1], table.prefill_axis[1], 0)
    for cell in ((1, 0, 0), (0, table.prefill_axis[-1], 0), top):
        runner.measure(*cell)  # warm the shape
        kept, now = table.predict_us(*cell), statistics.median(runner.measure(*cell) for _ in range(3))
        if abs(now - kept) > KEPT_TOLERANCE * kept:
            log.info("kept step table is out of date", extra={"cell": str(cell), "kept_us": kept, "now_us": now})
            return None
    log.info("kept step table taken", extra={"path": str(path)})
    return table


def _keep(table: StepTable, path: Path) -> None:
    """Keep the table for the next start; a folder that is not there or not writable costs nothing but that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(to_json(table))
        partial.replace(path)
    except OSError as error:
        log.info("step table not kept", extra={"path": str(path), "error": str(error)})
