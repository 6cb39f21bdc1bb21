"""The one thing that differs from a pod: steps take the time that a source says, and tokens are dummies.

Owns a replica's clock while a step runs, the declared noise, and when an answer ends. Speaks the runner's language, and
is the only file here that knows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import SamplingParams
from sluice_engine.core.steptime import StepTimes
from sluice_simulator.workload import END_TOKEN

# Any token but the end; what it says does not matter.
_TOKEN = 1

_ENDS = frozenset({END_TOKEN})


class Durations(Protocol):
    """How long steps take."""

    def of(self, plan: StepPlan) -> int:
        """Microseconds of a step on the device."""
        ...


class Noisy:
    """What a table says, times a factor drawn from a log-normal distribution whose median is 1.

    It is the machine, so it knows the table of the scenario, and not what the engine has learned from its steps since.
    """

    def __init__(self, times: StepTimes, sigma: float, source: random.Random, slowdown: float = 1.0) -> None:
        """`sigma` is the standard deviation of the factor's logarithm; 0: no noise."""
        self._times = times
        self._sigma = sigma
        self._source = source
        self._slowdown = slowdown

    def of(self, plan: StepPlan) -> int:
        """Microseconds of a step."""
        factor = self._slowdown
        if self._sigma:
            factor *= math.exp(self._source.gauss(0.0, self._sigma))
        predicted_us = self._times.predict_us(
            plan.decode_requests, plan.prefill_tokens, plan.context_tokens, plan.prior_pairs
        )
        return max(1, round(predicted_us * factor))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A while in which every step takes a multiple of its time: heat, a neighbour, a page fault."""

    from_us: int
    until_us: int
    factor: float


class Executor:
    """A runner whose device is a source of times."""

    def __init__(self, durations: Durations, num_slots: int, slowdowns: Sequence[Slowdown] = ()) -> None:
        self.now_us = 0
        """The engine's clock."""
        self.on_step: Callable[[StepPlan, int, int], None] | None = None
        """Told of each step before it is settled: the plan, when it began and when it ends."""
        self._durations = durations
        self._slowdowns = slowdowns
        self._ends: dict[str, int] = {}
        """By request id: known tokens after which its next one is the end, where the model ends it."""
        self._ends_by_slot = np.full(num_slots, -1, dtype=np.int64)

    def clock(self) -> int:
        """The engine's time."""
        return self.now_us

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the time of the step pass."""
        started_us = self.now_us
        ended_us = started_us + self._took_us(plan)
        if self.on_step is not None:
            self.on_step(plan, started_us, ended_us)
        self.now_us = ended_us
        is_end = plan.decode_starts + 1 == self._ends_by_slot[plan.decodes.slots]
        first = []
        for chunk in plan.chunks:
            ends = self._ends_by_slot[chunk.slot] = self._ends.get(chunk.request.id, -1)
            if chunk.samples:
                first.append(chunk.start + chunk.num_tokens == ends)
        if first:
            is_end = np.concatenate([is_end, first])
        return StepResult(plan.step, np.where(is_end, END_TOKEN, _TOKEN))

    def _took_us(self, plan: StepPlan) -> int:
        took_us = self._durations.of(plan)
        for one in self._slowdowns:
            if one.from_us <= self.now_us < one.until_us:
                took_us = round(took_us * one.factor)
        return took_us

    def expect(self, request_id: str, prompt_tokens: int, output_tokens: int, max_tokens: int) -> SamplingParams:
        """What the engine is asked for a request that will draw `output_tokens`, its end among them."""
        if output_tokens < max_tokens:
            self._ends[request_id] = prompt_tokens + output_tokens - 1
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=_ENDS)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._ends.pop(request_id, None)
