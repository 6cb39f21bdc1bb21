"""Loads and texts for `gpu_check`, in the engine's own loop: no server, no tokenizer, prompts of random tokens."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_weights import ONE_BILLION, Shape
from sluice_engine.calibrate import calibrate
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import EngineConfig
from sluice_engine.core.assemble import assemble
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import Capacity, StepLimits
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile, StepTable
from sluice_engine.executor import ThreadExecutor
from sluice_engine.live_config import LiveConfig, SLOConfig

PROMISE_US = 150_000
OUTPUT_TOKENS = 64
PROMPT_TOKENS = (128, 512)

Measured = tuple[StepTable, Capacity]


def spoken(runner: TorchRunner, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens after each prompt and their log probabilities, all in one batch."""
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=True)
    requests = [Request(str(i), list(p), len(p), params, 0) for i, p in enumerate(prompts)]
    values: dict[str, list[float]] = {request.id: [] for request in requests}
    loop = bare_loop(runner, depth=0)
    for request in requests:
        refusal = loop.add(request)
        assert refusal is None, refusal
    while loop.has_work:
        for emission in loop.step():
            if emission.logprob is not None:
                values[emission.request.id].append(emission.logprob.value)
    runner.close()
    return [(request.tokens[request.num_prompt :], values[request.id]) for request in requests]


def bare_loop(runner: TorchRunner, depth: int) -> EngineLoop:
    """A loop with the planning profile's step times: what comes out does not hang on them."""
    limits = StepLimits(
        max_sequences=16,
        token_budget=512,
        prefill_chunk_tokens=64,
        max_prefill_tokens_per_request=None,
        ceiling=ChunkCeiling(PlanningProfile(), 10_000_000),
        block_tokens=runner.block_tokens,
    )
    pool = BlockPool(runner.num_blocks, runner.block_tokens)
    scheduler = Scheduler(limits, pool, PlanningProfile(), max_length_tokens=runner.max_length_tokens, depth=depth)
    return EngineLoop(scheduler, runner, clock)


def clock() -> int:
    """Monotonic µs."""
    return time.monotonic_ns() // 1000


def live() -> LiveConfig:
    """The promise."""
    return LiveConfig(slo=SLOConfig(time_to_first_token_us=60_000_000, inter_token_latency_us=PROMISE_US))


def step_table(runner: TorchRunner, config: EngineConfig) -> tuple[Measured, dict[str, Any]]:
    """The calibration's table, and what follows from it."""
    measured = calibrate(runner, config, live(), clock)
    table, capacity = measured
    derived = assemble(config, live(), table, capacity).tuning.current.derived
    rows = {
        f"d{d} p{p}": table.predict_us(d, p, 0, 0)
        for d in table.decode_axis
        for p in table.prefill_axis
        if (d or p) and (p in table.prefill_axis[:3] or not d or p == table.prefill_axis[-1])
    }
    return measured, {
        "description": runner.description,
        "step_us": rows,
        "derived": dataclasses.asdict(derived),
        "kv_blocks": runner.num_blocks,
        "host_overhead_us": table.host_overhead_us,
        "largest_prefill_tokens": runner.largest_prefill_tokens,
    }


def under_load(
    runner: TorchRunner, config: EngineConfig, measured: Measured, coming: Iterator[Request], clients: int
) -> dict[str, float]:
    """A closed loop of so many clients in the engine's own loop: no server, no tokenizer."""
    core = assemble(config, live(), *measured)
    executor = ThreadExecutor(runner) if core.scheduler.depth else None
    loop = EngineLoop(core.scheduler, runner, clock, executor=executor, tuning=core.tuning)
    gaps: list[int] = []
    waits: list[int] = []
    tokens = 0

    def add() -> None:
        request = next(coming, None)
        if request is not None:
            request.arrival_us = clock()
            refusal = loop.add(request)
            assert refusal is None, refusal

    begun = time.monotonic()
    for _ in range(clients):
        add()
    while loop.has_work:
        for emission in loop.step():
            if emission.token_id is not None:
                tokens += 1
                if emission.gap_us is None:
                    waits.append(clock() - emission.request.arrival_us)
                else:
                    gaps.append(emission.gap_us)
            if emission.outcome is not None:
                assert emission.request.error is None, emission.request.error
                add()
    spent = time.monotonic() - begun
    if executor is not None:
        executor.close()
    outside = loop.host_us_total / max(1, loop.host_us_total + loop.runner_us_total)
    return {
        "output_tokens_per_s": round(tokens / spent, 1),
        "itl_p50_ms": _percentile(gaps, 50) / 1000,
        "itl_p99_ms": _percentile(gaps, 99) / 1000,
        "itl_max_ms": max(gaps, default=0) / 1000,
        "ttft_p50_ms": _percentile(waits, 50) / 1000,
        "outside_the_model": round(outside, 4),
    }


def requests(total: int, output: int, shape: Shape) -> Iterator[Request]:
    """Prompts of even lengths between the two."""
    low, high = PROMPT_TOKENS if shape is ONE_BILLION else (8, 40)
    for number in range(total):
        length = low + (high - low) * (number * 7 % 16) // 16
        tokens = prompt(100 + number, length, shape)
        yield Request(str(number), tokens, length, SamplingParams(max_tokens=output, temperature=0.0), 0)


def prompt(seed: int, length: int, shape: Shape) -> list[int]:
    """Random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, shape.vocab_size, length).tolist()
    return drawn


def _percentile(values: list[int], percent: int) -> float:
    if len(values) < 2:
        return float(values[0]) if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
