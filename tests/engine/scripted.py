"""A runner that computes nothing: it answers from a script and checks that every plan is one a device could run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import Logprob, ScheduledRequest, StepPlan, StepResult, TableChange
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile, StepTimes


@dataclass(frozen=True)
class SampledToken:
    """What a script says of one sampling row."""

    token_id: int
    logprob: Logprob | None = None
    error: str | None = None


Script = Callable[[ScheduledRequest], SampledToken]


def position_token(entry: ScheduledRequest) -> SampledToken:
    """A token that depends on the request's own history alone, as a real model's does."""
    request = entry.request
    token_id = (sum(request.tokens) * 31 + len(request.tokens)) % 1000 + 10
    return SampledToken(token_id)


def result_of(plan: StepPlan, tokens: Sequence[SampledToken]) -> StepResult:
    return StepResult(
        plan.step,
        np.array([token.token_id for token in tokens], dtype=np.int64),
        {row: token.logprob for row, token in enumerate(tokens) if token.logprob is not None},
        {row: token.error for row, token in enumerate(tokens) if token.error is not None},
    )


Cell = tuple[str, int] | None
"""What a block's cell holds: whose tokens, and all of them up to here. So a block may be shared by those who agree."""


def cells_of(entry: ScheduledRequest) -> list[Cell]:
    """What the cells of a request have to hold up to the end of this share, as far as its tokens are known."""
    cells: list[Cell] = []
    chain = 0
    for token in entry.request.tokens[: entry.start + entry.num_tokens]:
        chain = hash((chain, token))
        cells.append((entry.request.tenant, chain))
    return cells


class ScriptedRunner:
    """Keeps the plans it ran, and the KV that a device would hold: nothing is read before it is written."""

    def __init__(self, block_tokens: int, script: Script = position_token) -> None:
        self.block_tokens = block_tokens
        self.script = script
        self.plans: list[StepPlan] = []
        self._kv: dict[int, list[Cell]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        slots = [entry.slot for entry in plan.scheduled]
        assert len(set(slots)) == len(slots), "two requests in one slot"
        for entry in plan.scheduled:
            self._write(entry)
        for entry in plan.scheduled:
            self._read(entry)
        return result_of(plan, [self.script(entry) for entry in plan.sampling()])

    def _cell(self, entry: ScheduledRequest, position: int) -> tuple[int, int]:
        return entry.request.blocks[position // self.block_tokens], position % self.block_tokens

    def _write(self, entry: ScheduledRequest) -> None:
        contents = cells_of(entry)
        for position in range(entry.start, entry.start + entry.num_tokens):
            block, offset = self._cell(entry, position)
            cells = self._kv.setdefault(block, [None] * self.block_tokens)
            cells[offset] = contents[position]

    def _read(self, entry: ScheduledRequest) -> None:
        for position, expected in enumerate(cells_of(entry)):
            block, offset = self._cell(entry, position)
            assert self._kv[block][offset] == expected, "a token attends to KV that is not its own"


def plan_of(step: int, *entries: ScheduledRequest) -> StepPlan:
    """A plan of these shares, each with the blocks that its request holds."""
    return StepPlan(
        step=step,
        chunks=entries,
        prefill_tokens=sum(entry.num_tokens for entry in entries),
        prior_pairs=sum(entry.num_tokens * entry.start for entry in entries),
        table_changes=tuple(TableChange(entry.slot, 0, tuple(entry.request.blocks)) for entry in entries),
    )


def make_limits(
    *,
    max_sequences: int = 8,
    token_budget: int = 64,
    chunk: int | None = None,
    per_request: int | None = None,
    block_tokens: int = 4,
    promise_us: int = 150_000,
    times: StepTimes | None = None,
) -> StepLimits:
    return StepLimits(
        max_sequences=max_sequences,
        token_budget=token_budget,
        prefill_chunk_tokens=chunk,
        max_prefill_tokens_per_request=per_request,
        ceiling=ChunkCeiling(times or PlanningProfile(), promise_us),
        block_tokens=block_tokens,
    )


def make_scheduler(
    limits: StepLimits | None = None,
    *,
    num_blocks: int = 64,
    max_length: int = 4096,
    times: StepTimes | None = None,
    depth: int = 0,
    **policies: Any,
) -> Scheduler:
    limits = limits or make_limits()
    pool = BlockPool(num_blocks, limits.block_tokens)
    return Scheduler(
        limits,
        pool,
        times or PlanningProfile(),
        max_length_tokens=max_length,
        policies=Policies(**policies),
        depth=depth,
    )


def make_request(
    request_id: str, prompt: int, max_tokens: int, *, arrival_us: int = 0, stop: frozenset[int] = frozenset()
) -> Request:
    tokens = [(sum(request_id.encode()) + i) % 997 for i in range(prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop)
    return Request(request_id, tokens, prompt, sampling, arrival_us)


def make_loop(scheduler: Scheduler, script: Script = position_token) -> EngineLoop:
    ticks = iter(range(0, 1 << 62, 1000))
    return EngineLoop(scheduler, ScriptedRunner(scheduler.pool.block_tokens, script), lambda: next(ticks))


def check_invariants(scheduler: Scheduler, max_running: int | None = None) -> None:
    """Every block in exactly one place, every slot with one owner, every request in one state.

    `max_running`: where the limit has come down below those that run already.
    """
    pool = scheduler.pool
    tables = [request.blocks for request in scheduler.running]
    assert all(len(set(table)) == len(table) for table in tables)
    held = [block for table in tables for block in table]
    if not scheduler.prefix.enabled:
        assert len(set(held)) == len(held), "two requests hold a block"
    everything = sorted([*set(held), *pool.free_ids(), *pool.cached_ids(), *pool.fenced_ids()])
    assert everything == list(range(pool.num_blocks)), "a block is lost, or in two places"
    slots = [request.slot for request in scheduler.running]
    assert len(set(slots)) == len(slots)
    assert len(scheduler.running) <= (scheduler.limits.max_sequences if max_running is None else max_running)
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    for request in scheduler.running:
        assert blocks_for(request.num_computed, scheduler.pool.block_tokens) <= len(request.blocks)
        assert request.num_computed < request.num_tokens
