"""The engine's loop: schedule → run → update, over a runner and a clock that are passed in.

Up to `scheduler.depth` steps run while the next is planned; a runner that computes in the calling thread works with any
depth, one that computes elsewhere gains by it. An error of the runner fails the requests of that step, never the loop;
only a runner that fails over and over ends it. Owned by one thread; `step_started_us` and `step_predicted_us` may be
read from another. Start reading at `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from sluice_engine.core.emissions import Emission, Emissions
from sluice_engine.core.ended import ENDED_KEPT, EndedRequest, ended_request
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.state import FinishedState
from sluice_engine.core.trace import StepTrace
from sluice_engine.core.tuning import Tuning

# A device that is gone fails every step: three in a row without one success is not a request's fault.
MAX_CONSECUTIVE_FAILURES = 3

# A step may take long once (first use of a shape, a page fault), never this long.
HUNG_AFTER_US = 10_000_000
HUNG_AFTER_PREDICTIONS = 20

# Long enough for a gate that polls five times a second to see every end, short enough to cost nothing.
FINISHED_KEPT = 512


class Runner(Protocol):
    """What computes a step in the calling thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the batch and sample. The plan is not empty."""
        ...


class Executor(Protocol):
    """What computes steps in the order in which they are handed over, perhaps meanwhile."""

    def submit(self, plan: StepPlan) -> None:
        """Take a step that is not empty; return at once."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; wait for it."""
        ...


class InTurn:
    """A runner as an executor: a step is computed when its result is asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Remember the step."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Compute the oldest."""
        return self._runner.execute(self._plans.popleft())


class RunnerLost(Exception):
    """A part of what computes is gone for good: no step can succeed any more."""


class RunnerFailed(Exception):
    """The runner failed several steps in a row, or for good; the engine cannot go on."""

    def __init__(self, message: str, emissions: Emissions) -> None:
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
        executor: Executor | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """`executor`: computes the runner's steps elsewhere; without one they are computed here, in turn.

        `tuning`: learns from what each step took; without it the limits stay as they are.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.trace = trace if trace is not None else StepTrace()
        self.step_started_us = 0
        """When the oldest step in flight began; 0 between steps."""
        self.step_predicted_us = 0
        self.runner_us_total = 0
        self.host_us_total = 0
        """Time of steps outside the runner: planning, settling, recording."""
        self.failed_steps_total = 0
        self.finished: deque[FinishedState] = deque(maxlen=FINISHED_KEPT)
        self.ended: deque[EndedRequest] = deque(maxlen=ENDED_KEPT)
        """What it takes to replay the lately ended."""
        self.last_plan: StepPlan | None = None
        """The plan that was made last, empty or not."""
        self.last_settled: StepPlan | None = None
        """The plan whose result came last."""
        self.last_real_us = 0
        self._tuning = tuning
        self._executor = executor if executor is not None else InTurn(runner)
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self._last_ended_us = 0
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step is in flight."""
        return self.scheduler.has_work

    def add(self, request: Request) -> str | None:
        """Queue a request; a sentence when it can never fit, and then it is not queued."""
        request.queued_us, request.queued_step = self.clock(), self.scheduler.step
        return self.scheduler.add(request)

    def abort(self, request_id: str, outcome: Outcome = Outcome.ABORTED, error: str | None = None) -> Emissions:
        """End a request from outside; nothing when it has ended already."""
        return self._end_all([request_id], outcome, error)

    def step(self) -> Emissions:
        """Plan a step where the window has room, settle one where it has not: what the callers are told then.

        Raises:
            RunnerFailed: too many steps in a row failed, or one for good; the requests of the last have been ended.
        """
        begun = self.clock()
        emissions = Emissions()
        if self.scheduler.must_drain_first() is None:
            plan = self.last_plan = self.scheduler.schedule(begun)
            emissions.extend(self._planned(plan))
            if not plan.is_empty:
                self._submit(plan)
                if self.scheduler.must_drain_first() is None:
                    self.host_us_total += self.clock() - begun
                    return emissions
        if not self._in_flight:
            return emissions
        waited_from = self.clock()
        self.host_us_total += waited_from - begun
        emissions.extend(self._collect())
        return emissions

    def hung(self, now_us: int) -> bool:
        """Whether the step in flight has outlived every excuse."""
        started = self.step_started_us
        return bool(started) and now_us - started > max(HUNG_AFTER_US, HUNG_AFTER_PREDICTIONS * self.step_predicted_us)

    def _planned(self, plan: StepPlan) -> Emissions:
        """What planning itself has ended."""
        ended = (*plan.expired, *plan.failed)
        for request in ended:
            self._note_end(request)
        emissions = Emissions([Emission(request, outcome=request.outcome) for request in ended])
        stuck = [request.id for request in self.scheduler.stuck(plan)]
        emissions.extend(self._end_all(stuck, Outcome.FAILED, "it runs alone and cannot get another KV block"))
        if plan.is_empty and (plan.preempted or plan.expired or plan.failed):
            self.trace.append(plan, self.clock(), 0)
        return emissions

    def _submit(self, plan: StepPlan) -> None:
        now = self.clock()
        self._in_flight.append((plan, now))
        if len(self._in_flight) == 1:
            self.step_predicted_us, self.step_started_us = plan.predicted_us, now
        self._executor.submit(plan)

    def _collect(self) -> Emissions:
        """Wait for the oldest step and settle it."""
        plan, submitted_us = self._in_flight[0]
        error: Exception | None = None
        try:
            result = self._executor.collect()
        except Exception as caught:  # noqa: BLE001  # whatever a device raises fails these requests, not the engine
            error, result = caught, StepResult.failed(plan.step, f"step {plan.step} failed: {_said(caught)}")
        ended = self.clock()
        self._in_flight.popleft()
        # A step that was handed over while another ran began when that one ended.
        started, self._last_ended_us = max(submitted_us, self._last_ended_us), ended
        self._watch_next(ended)
        self.scheduler.ran(plan, ended - started)
        emissions = self.scheduler.update(result, ended)
        for emission in emissions.special():
            if emission.outcome is not None:
                self._note_end(emission.request)
        if error is not None:
            self._count_failure(error, emissions)
            return emissions
        self._failures_in_a_row = 0
        self.last_settled, self.last_real_us = plan, ended - started
        self.trace.append(plan, started, ended - started)
        if self._tuning is not None:
            self._tuning.settled(plan, ended - started)
        self.runner_us_total += ended - started
        self.host_us_total += self.clock() - ended
        return emissions

    def _watch_next(self, now_us: int) -> None:
        if self._in_flight:
            self.step_predicted_us, self.step_started_us = self._in_flight[0][0].predicted_us, now_us
        else:
            self.step_started_us = 0

    def _count_failure(self, error: Exception, emissions: Emissions) -> None:
        self.failed_steps_total += 1
        self._failures_in_a_row += 1
        if isinstance(error, RunnerLost):
            raise RunnerFailed(str(error), emissions) from error
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            message = f"{self._failures_in_a_row} steps in a row failed, the last with {error}"
            raise RunnerFailed(message, emissions) from error

    def _end_all(self, request_ids: list[str], outcome: Outcome, error: str | None) -> Emissions:
        ended = [request for name in request_ids if (request := self.scheduler.end(name, outcome, error)) is not None]
        for request in ended:
            self._note_end(request)
        return Emissions([Emission(request, outcome=outcome) for request in ended])

    def _note_end(self, request: Request) -> None:
        assert request.outcome is not None
        self.ended.append(ended_request(request, self.clock(), self.scheduler.step, self.scheduler.pool.block_tokens))
        self.finished.append(
            FinishedState(
                id=request.gate_id or request.id,
                choice=request.index,
                outcome=request.outcome,
                prompt_tokens=request.num_prompt,
                output_tokens=request.num_output,
                cached_tokens=request.num_cached_tokens,
            )
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
