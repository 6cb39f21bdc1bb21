"""The engine's loop: schedule → run → update, over a runner and a clock that are passed in.

An error of the runner fails the requests of that step, never the loop; only a runner that fails over and over ends it.
Owned by one thread; `step_started_us` and `step_predicted_us` may be read from another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from sluice_engine.core.plan import Emission, StepPlan, StepResult
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.state import FinishedState
from sluice_engine.core.trace import StepTrace, record_of

# A device that is gone fails every step: three in a row without one success is not a request's fault.
MAX_CONSECUTIVE_FAILURES = 3

# A step may take long once (first use of a shape, a page fault), never this long.
HUNG_AFTER_US = 10_000_000
HUNG_AFTER_PREDICTIONS = 20

# Long enough for a gate that polls five times a second to see every end, short enough to cost nothing.
FINISHED_KEPT = 512


class Runner(Protocol):
    """What computes a step."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the batch and sample. The plan is not empty."""
        ...


class RunnerFailed(Exception):
    """The runner failed several steps in a row; the engine cannot go on."""

    def __init__(self, message: str, emissions: list[Emission]) -> None:
        super().__init__(message)
        self.emissions = emissions
        """Ends of the requests of the last failed step, still to be told."""


class EngineLoop:
    """One engine's loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], int],
        trace: StepTrace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.trace = trace if trace is not None else StepTrace()
        self.step_started_us = 0
        """When the step in flight began; 0 between steps."""
        self.step_predicted_us = 0
        self.runner_us_total = 0
        self.host_us_total = 0
        """Time of steps outside the runner: planning, settling, recording."""
        self.failed_steps_total = 0
        self.finished: deque[FinishedState] = deque(maxlen=FINISHED_KEPT)
        self.last_plan: StepPlan | None = None
        self.last_real_us = 0
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_work

    def add(self, request: Request) -> str | None:
        """Queue a request; a sentence when it can never fit, and then it is not queued."""
        return self.scheduler.add(request)

    def abort(self, request_id: str, outcome: Outcome = Outcome.ABORTED, error: str | None = None) -> list[Emission]:
        """End a request from outside; nothing when it has ended already."""
        request = self.scheduler.end(request_id, outcome, error)
        if request is None:
            return []
        self._note_end(request)
        return [Emission(request, outcome=outcome)]

    def step(self) -> list[Emission]:
        """One step, and what the callers are told after it.

        Raises:
            RunnerFailed: too many steps in a row failed; the requests of the last have been ended.
        """
        begun = self.clock()
        plan = self.scheduler.schedule(begun)
        if not plan.scheduled:
            self.last_plan = plan
            return self._fail(self.scheduler.stuck(plan), "it runs alone and cannot get another KV block")
        self.step_predicted_us = plan.predicted_us
        self.step_started_us = started = self.clock()
        try:
            result = self.runner.execute(plan)
        except Exception as error:  # noqa: BLE001  # whatever a device raises fails these requests, not the engine
            self.step_started_us = 0
            return self._fail_step(plan, error)
        ended = self.clock()
        self.step_started_us = 0
        self._failures_in_a_row = 0
        emissions = self.scheduler.update(plan, result)
        for emission in emissions:
            if emission.outcome is not None:
                self._note_end(emission.request)
        self.last_plan, self.last_real_us = plan, ended - started
        self.trace.append(record_of(plan, started, ended - started))
        self.runner_us_total += ended - started
        self.host_us_total += self.clock() - ended + started - begun
        return emissions

    def hung(self, now_us: int) -> bool:
        """Whether the step in flight has outlived every excuse."""
        started = self.step_started_us
        return bool(started) and now_us - started > max(HUNG_AFTER_US, HUNG_AFTER_PREDICTIONS * self.step_predicted_us)

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[Emission]:
        self.failed_steps_total += 1
        self._failures_in_a_row += 1
        live = [entry.request for entry in plan.scheduled if entry.request.outcome is None]
        emissions = self._fail(live, f"step {plan.step} failed: {type(error).__name__}: {error}")
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            message = f"{self._failures_in_a_row} steps in a row failed, the last with {error}"
            raise RunnerFailed(message, emissions) from error
        return emissions

    def _fail(self, requests: list[Request], error: str) -> list[Emission]:
        return [emission for request in requests for emission in self.abort(request.id, Outcome.FAILED, error)]

    def _note_end(self, request: Request) -> None:
        assert request.outcome is not None
        self.finished.append(
            FinishedState(
                id=request.gate_id or request.id,
                choice=request.index,
                outcome=request.outcome,
                prompt_tokens=request.num_prompt,
                output_tokens=request.num_output,
            )
        )
