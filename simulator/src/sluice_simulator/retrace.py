"""A record's steps planned again: does the same scheduler, given the same requests at the same steps, plan the same?

Owns the comparison, step by step. Commands reach the loop between the very steps between which they reached the real
one, and steps take the time that they took, so nothing but a difference in the scheduler, or something that the record
does not hold (what the prompts say, for the prefix cache), can make the plans differ.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sluice_engine.core.assemble import Assembled
from sluice_engine.core.ended import EndedRequest
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Request
from sluice_simulator.executor import Executor
from sluice_simulator.record import Record, RecordedStep
from sluice_simulator.recorded import GOOD_ENDS, arrival_of
from sluice_simulator.workload import prompt_of

Shares = list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraced:
    """What the comparison found."""

    compared: int
    same: int
    """Steps until the first difference."""
    difference: str = ""
    """The first, in words; empty when there is none."""


class _Comparing:
    """Takes each plan's recorded time, and sees whether the plan is the recorded one."""

    def __init__(self, steps: tuple[RecordedStep, ...]) -> None:
        self._steps = steps
        self.seen = 0
        self.difference = ""

    def of(self, plan: StepPlan) -> int:
        """Microseconds of the recorded step in this place."""
        if self.seen >= len(self._steps) or self.difference:
            return max(1, plan.predicted_us)
        recorded = self._steps[self.seen]
        planned = sorted((one.request.id, one.start, one.num_tokens) for one in plan.scheduled)
        real = sorted((one.request_id, one.start, one.num_tokens) for one in recorded.scheduled)
        if planned == real:
            self.seen += 1
        else:
            self.difference = f"step {recorded.step}: {_told(real, planned)}"
        return max(1, recorded.real_us)


def retrace(record: Record, assembled: Assembled) -> Retraced:
    """Plan the record's steps again, as far as the record knows the requests in them."""
    known = {request.request_id for request in record.requests}
    steps = []
    for step in record.steps:
        if not all(share.request_id in known for share in step.scheduled):
            break  # it had not ended when the record did
        if step.scheduled:
            steps.append(step)
    if not steps:
        return Retraced(compared=0, same=0, difference="the record begins with requests that never end in it")
    first = steps[0].step
    if any(request.queued_step < first - 1 for request in record.requests):
        return Retraced(compared=0, same=0, difference="requests were in flight when the record began")
    comparing = _Comparing(tuple(steps))
    _drive(record, assembled, comparing, first)
    difference = comparing.difference
    if not difference and comparing.seen < len(steps):
        difference = f"step {steps[comparing.seen].step} was never planned"
    return Retraced(compared=len(steps), same=comparing.seen, difference=difference)


def _drive(record: Record, assembled: Assembled, comparing: _Comparing, first: int) -> None:
    scheduler = assembled.scheduler
    executor = Executor(comparing, assembled.scheduler.rows.num_slots)
    # The engine learned from these steps as they ran: its limits moved with them.
    loop = EngineLoop(scheduler, executor, executor.clock, tuning=assembled.tuning)
    scheduler.step = first - 1
    start_us = min(request.arrival_us for request in record.requests)
    queued = deque(enumerate(record.requests))
    leaving = deque(
        sorted((one for one in record.requests if one.outcome not in GOOD_ENDS), key=lambda one: one.ended_step)
    )
    while not comparing.difference:
        while queued and queued[0][1].queued_step <= scheduler.step:
            number, one = queued.popleft()
            loop.add(_request(one, number, executor, start_us, record.block_tokens))
        while leaving and leaving[0].ended_step <= scheduler.step:
            loop.abort(leaving.popleft().request_id)
        if not loop.has_work:
            return
        before = scheduler.step, len(scheduler.window)
        loop.step()
        if before == (scheduler.step, 0):
            return  # nothing was in flight, and it plans nothing: what it waits for is not in the record


def _request(one: EndedRequest, number: int, executor: Executor, start_us: int, block_tokens: int) -> Request:
    arrival = arrival_of(one, start_us, block_tokens)
    return Request(
        id=one.request_id,
        tokens=prompt_of(arrival, number),
        num_prompt=one.prompt_tokens,
        sampling=executor.expect(one.request_id, one.prompt_tokens, arrival.output_tokens, one.max_tokens),
        arrival_us=one.arrival_us - start_us,
        priority=one.priority,
        tenant=one.tenant,
    )


def _told(real: Shares, planned: Shares) -> str:
    missing = [one for one in real if one not in planned][:2]
    extra = [one for one in planned if one not in real][:2]
    parts = [f"{name} {_shares(shares)}" for name, shares in (("recorded", missing), ("planned", extra)) if shares]
    return ", ".join(parts)


def _shares(shares: Shares) -> str:
    return " and ".join(f"{name} [{start}, {start + count})" for name, start, count in shares)
