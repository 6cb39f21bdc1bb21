"""The practice of four requests under 16 token slots and 40 units of state, played by the engine's own scheduler.

Owns the driver: a step is one tick of the clock, so that times, deadlines and aging count steps. Nothing here decides
who runs. Start reading at `play`; `worked_example.py` makes the page of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from sluice_engine.config import Policy, VictimPolicy
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import Preemption, StepPlan, StepResult
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import ChunkCeiling

TICK_US = 1_000_000
TOKEN_BUDGET = 16
UNITS = 40
CHUNK = 8
MOST_REQUESTS = 16
# Far beyond any schedule here: one that comes near it goes round in circles.
_MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class Tick:
    """Step times of a clock that counts steps: each takes one tick, whatever it carries."""

    revision: ClassVar[int] = 0

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """One tick."""
        del decode_requests, prefill_tokens, context_tokens, prior_pairs
        return TICK_US

    def bound_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """One tick."""
        return self.predict_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the practice."""

    name: str
    step: int
    prompt: int
    output: int
    priority: int = 4

    @property
    def need(self) -> int:
        """Units it holds at most: the last token never holds state."""
        return self.prompt + self.output - 1


FOUR = (
    Arrival(name="A", step=0, prompt=24, output=4),
    Arrival(name="B", step=0, prompt=4, output=8, priority=2),
    Arrival(name="C", step=1, prompt=8, output=4, priority=0),
    Arrival(name="D", step=2, prompt=20, output=2, priority=6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a variant plays."""

    title: str
    policy: Policy = "FirstComeFirstServed"
    victim: VictimPolicy = "LeastComputed"
    chunk: int | None = CHUNK
    """Most prefill of one request in one step; None: a prefill is never split."""
    aging_steps: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One step as it ran."""

    number: int
    prefills: tuple[tuple[str, int], ...]
    decodes: tuple[str, ...]
    preempted: tuple[Preemption, ...]
    held_units: int
    """After the step, before what it ends is freed."""
    ended: tuple[str, ...]
    waiting: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Slots used."""
        return len(self.decodes) + sum(tokens for _, tokens in self.prefills)


@dataclass(slots=True, kw_only=True)
class Schedule:
    """What came of a variant."""

    rules: Rules
    lines: list[Line] = field(default_factory=list)
    first_token: dict[str, int] = field(default_factory=dict)
    """Step in which the first token came, by name."""
    finished: dict[str, int] = field(default_factory=dict)
    """Step of the last token."""
    expired: dict[str, int] = field(default_factory=dict)
    """Step before which a request's deadline took it out of the order."""

    def ttft(self, arrival: Arrival) -> int:
        """Steps from the arrival to the end of the step with the first token."""
        return self.first_token[arrival.name] - arrival.step + 1

    def latency(self, arrival: Arrival) -> int:
        """Steps from the arrival to the end of the step with the last token."""
        return self.finished[arrival.name] - arrival.step + 1

    @property
    def preemptions(self) -> list[tuple[int, Preemption]]:
        """Each with its step."""
        return [(line.number, one) for line in self.lines for one in line.preempted]


def play(rules: Rules, arrivals: Iterable[Arrival] = FOUR, *, deadlines: dict[str, int] | None = None) -> Schedule:
    """The schedule of the practice under `rules`; `deadlines` are steps from the arrival to the last token."""
    scheduler = Scheduler(
        _limits(rules.chunk),
        BlockPool(UNITS, block_tokens=1),
        Tick(),
        max_length_tokens=2 * UNITS,
        policies=Policies(order=rules.policy, victim=rules.victim, aging_interval_us=rules.aging_steps * TICK_US),
    )
    schedule = Schedule(rules=rules)
    door = [(arrival, _request(arrival, (deadlines or {}).get(arrival.name))) for arrival in arrivals]
    number = 0
    while door or scheduler.has_work:
        assert number < _MOST_STEPS, "the practice goes round in circles"
        now_us = number * TICK_US
        if rules.chunk is None:
            _admit_whole(scheduler, door, number)
        else:
            while door and door[0][0].step <= number:
                _add(scheduler, door.pop(0)[1])
        plan = scheduler.schedule(now_us)
        schedule.expired |= {request.id: number for request in plan.expired}
        if not plan.is_empty:
            schedule.lines.append(_run(scheduler, plan, number, schedule, door))
        number += 1
    return schedule


def _limits(chunk: int | None, token_budget: int = TOKEN_BUDGET) -> StepLimits:
    return StepLimits(
        max_sequences=MOST_REQUESTS,
        token_budget=token_budget,
        # What the text bounds is the whole step: prefill may take all that decodes leave.
        prefill_chunk_tokens=token_budget,
        max_prefill_tokens_per_request=chunk,
        ceiling=ChunkCeiling(Tick(), TICK_US),
        block_tokens=1,
    )


def _request(arrival: Arrival, deadline: int | None) -> Request:
    return Request(
        id=arrival.name,
        tokens=[1] * arrival.prompt,
        num_prompt=arrival.prompt,
        sampling=SamplingParams(max_tokens=arrival.output),
        arrival_us=arrival.step * TICK_US,
        priority=arrival.priority,
        finish_deadline_us=None if deadline is None else (arrival.step + deadline) * TICK_US,
        expected_output_tokens=arrival.output,
    )


def _add(scheduler: Scheduler, request: Request) -> None:
    problem = scheduler.add(request)
    assert problem is None, problem


def _admit_whole(scheduler: Scheduler, door: list[tuple[Arrival, Request]], number: int) -> None:
    """Hand on, in order, whoever's whole prompt fits this step; one larger than a step opens the budget for itself.

    The scheduler always chunks, so a prefill that is never split has to be played from outside: requests wait in front
    of it, and the token budget of one step is raised to what the oversized prompt needs beside the decodes.
    """
    scheduler.limits = _limits(None)
    # Preempted ones come first; they fit, and leave less to those at the door.
    waiting = [request.num_tokens for request in scheduler.waiting]
    decodes = sum(request.num_output > 0 for request in scheduler.running)
    free = scheduler.pool.num_free - sum(waiting) - decodes
    left = TOKEN_BUDGET - decodes - sum(waiting)
    while door and door[0][0].step <= number and door[0][0].prompt <= free:
        prompt = door[0][0].prompt
        if prompt > left:
            if prompt <= TOKEN_BUDGET or left < TOKEN_BUDGET - decodes:
                return
            scheduler.limits = _limits(None, decodes + prompt)
        left -= prompt
        free -= prompt
        _add(scheduler, door.pop(0)[1])


def _run(
    scheduler: Scheduler, plan: StepPlan, number: int, schedule: Schedule, door: list[tuple[Arrival, Request]]
) -> Line:
    held_units = scheduler.pool.num_blocks - scheduler.pool.num_free
    requests = {entry.request.id: entry for entry in plan.scheduled}
    decoding = {name for name, entry in requests.items() if entry.num_tokens == 1 and entry.request.num_output}
    scheduler.update(
        StepResult(plan.step, np.full(plan.num_sampling, 7, dtype=np.int64)), now_us=(number + 1) * TICK_US
    )
    for name, entry in requests.items():
        if entry.samples and entry.request.num_output == 1:
            schedule.first_token[name] = number
        if entry.request.outcome is Outcome.LENGTH:
            schedule.finished[name] = number
    return Line(
        number=number,
        prefills=tuple((name, entry.num_tokens) for name, entry in requests.items() if name not in decoding),
        decodes=tuple(sorted(decoding)),
        preempted=plan.preempted,
        held_units=held_units,
        ended=tuple(name for name, entry in requests.items() if entry.request.outcome is not None),
        waiting=tuple(
            sorted(
                {request.id for request in scheduler.waiting}
                | {arrival.name for arrival, _ in door if arrival.step <= number}
            )
        ),
    )


def alone(arrival: Arrival, chunk: int | None = CHUNK) -> int:
    """Steps that a request needs with the whole engine to itself."""
    by_itself = replace(arrival, step=0)
    return play(Rules(title="alone", chunk=chunk), [by_itself]).latency(by_itself)
