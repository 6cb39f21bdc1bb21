"""What a step costs outside the model: schedule + settle + record, per running request, in microseconds.

All requests decode, at 64, 256 and 1,024 running: with nobody and with 10,000 waiting; planned step by step and with
one step in flight; with one request in a hundred ending, and another starting, in each step; early and late in long
outputs. The runner is an array of constants, so nothing but the scheduler is measured, in processor time, so that other
programs count little. The median of the rounds counts.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from report import Bar, Report, arguments
from sluice_engine.config import Policy
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile
from sluice_engine.core.trace import StepTrace

BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
TARGET_US = 1.2
# vLLM 0.32's scheduler, schedule + update_from_output with all requests decoding, on a machine of this kind.
PEER_US = {256: 11.4, 1024: 12.3}


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    name: str
    running: int
    waiting: int = 0
    depth: int = 0
    churn: bool = False
    output_tokens: int = 4096
    skip_steps: int = 0
    prefix: bool = False
    policy: Policy = "FirstComeFirstServed"


CASES = [
    *(Case(f"{n} decode", n) for n in (64, 256, 1024)),
    *(Case(f"{n} decode, 10,000 wait", n, waiting=10_000) for n in (256, 1024)),
    *(Case(f"{n} decode, one step in flight", n, depth=1) for n in (256, 1024)),
    *(Case(f"{n} decode, 1 % start and end", n, churn=True) for n in (256, 1024)),
    *(Case(f"{n} decode, 1 % start and end, 10,000 wait", n, churn=True, waiting=10_000) for n in (256, 1024)),
    *(Case(f"{n} decode, prefix cache", n, prefix=True) for n in (256, 1024)),
    *(Case(f"{n} decode, 2,000 tokens later", n, skip_steps=2000) for n in (256, 1024)),
    *(
        Case(f"{n} decode, 1 % start and end, 1,000 wait, {policy}", n, churn=True, waiting=1000, policy=policy)
        for policy in get_args(Policy)
        for n in (256, 1024)
    ),
]


class Load:
    """A scheduler full of decoding requests, and steps over it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.starts = case.running // 100
        self.lifetime = case.running // self.starts if case.churn else case.output_tokens
        limits = StepLimits(
            max_sequences=case.running,
            token_budget=case.running + 100_000,
            prefill_chunk_tokens=100_000,
            max_prefill_tokens_per_request=None,
            ceiling=ChunkCeiling(PlanningProfile(), 1 << 40),
            block_tokens=BLOCK_TOKENS,
        )
        blocks = case.running * ((PROMPT_TOKENS + case.output_tokens) // BLOCK_TOKENS + 2)
        pool = BlockPool(blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(
            limits,
            pool,
            PlanningProfile(),
            max_length_tokens=1 << 20,
            policies=Policies(order=case.policy, fairness_unit="DeviceTime"),
            prefix=PrefixCache(pool, enabled=case.prefix),
            depth=case.depth,
        )
        self.trace = StepTrace()
        self._ids = itertools.count()
        self._in_flight: deque[StepPlan] = deque()
        self.now_us = 0
        for number in range(case.running):
            # With churn, requests end one after another instead of all at once.
            self.add(8 + self.lifetime * number // case.running if case.churn else case.output_tokens)
        for _ in range(6):
            self.step()
        for _ in range(case.waiting):
            self.add(self.lifetime)
        for _ in range(case.skip_steps):
            self.step()

    def add(self, output_tokens: int) -> None:
        number = next(self._ids)
        tokens = [number % 1000] * PROMPT_TOKENS
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, stop_token_ids=frozenset({2}))
        request = Request(f"r{number}/0", tokens, PROMPT_TOKENS, sampling, self.now_us + number)
        request.tenant, request.priority = f"tenant {number % 10}", 2 * (number % 5)
        request.finish_deadline_us = 1 << 50
        assert self.scheduler.add(request) is None

    def step(self) -> int:
        """One step; nanoseconds of it."""
        scheduler = self.scheduler
        self.now_us += 20_000
        if self.case.churn and len(scheduler.waiting) <= self.case.waiting:
            for _ in range(self.starts):
                self.add(self.lifetime)
        begun = time.thread_time_ns()
        plan = scheduler.schedule(self.now_us)
        planned = time.thread_time_ns()
        self._in_flight.append(plan)
        if len(self._in_flight) <= self.case.depth:
            return 0
        oldest = self._in_flight.popleft()
        result = StepResult(oldest.step, np.full(oldest.num_sampling, 7, dtype=np.int64))
        came = time.thread_time_ns()
        scheduler.ran(oldest, 20_000)
        scheduler.update(result, self.now_us)
        self.trace.append(oldest, self.now_us, 20_000)
        return planned - begun + time.thread_time_ns() - came


def measure(case: Case, steps: int) -> Callable[[], float]:
    """A round of so many steps: µs per running request and step."""
    load = Load(case)

    def round_of() -> float:
        spent = running = 0
        for _ in range(steps):
            spent += load.step()
            running += load.scheduler.rows.num_running
        assert running > 0.9 * steps * case.running, f"{case.name}: {running / steps:.0f} ran"
        return spent / 1000 / running

    return round_of


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("scheduler_step")
    rounds, steps = (3, 40) if args.quick else (10, 100)
    figures: dict[str, float] = {}
    for case in CASES:
        one_round = measure(case, steps)
        gc.collect()
        gc.freeze()  # as the engine does once it is started
        figures[case.name] = statistics.median(one_round() for _ in range(rounds))
        peer = (
            f"   vLLM 0.32: {PEER_US[case.running]}" if case.running in PEER_US and case.name.endswith("decode") else ""
        )
        print(f"  {case.name:66} {figures[case.name]:6.3f} µs per running request and step{peer}", flush=True)
        if case.running >= 256:
            report.bars.append(Bar(case.name, round(figures[case.name], 3), "µs", TARGET_US, "lower"))
    report.data = {"us_per_running_request_and_step": figures, "peer_vllm_0_32_us": PEER_US}
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
