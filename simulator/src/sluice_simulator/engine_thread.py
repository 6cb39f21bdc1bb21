"""The engine's thread of one pod in virtual time: commands between steps, steps that end when their time has passed.

Owns what `service.py` does in a pod, and nothing of what the engine decides. A step is computed at once and told of at
its end: who looks in between sees its beginning. Start reading at `_turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from sluice_engine.core.assemble import Assembled
from sluice_engine.core.emissions import DecodedTokens, Emission, Emissions
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.state import SCHEMA_VERSION, DerivedLimits, EngineState, PoolState, request_state
from sluice_simulator.call import Call
from sluice_simulator.errors import Stuck
from sluice_simulator.events import Events, Timer
from sluice_simulator.executor import Executor
from sluice_simulator.tally import Tally

# An engine whose plan is empty while work exists looks again after this long: a pod's would spin.
_LOOK_AGAIN_US = 1_000
# So often in a row without anything else happening, it never will.
_MOST_EMPTY_PLANS = 60_000

Command = Callable[[EngineLoop], Emissions]


class Listener(Protocol):
    """Whoever put requests in."""

    def began(self, call: Call, now_us: int) -> None:
        """Its first token came."""
        ...

    def ended(self, call: Call, outcome: Outcome, now_us: int) -> None:
        """Its answer came to an end."""
        ...

    def impossible(self, call: Call, problem: str) -> None:
        """It can never fit, and was not taken in."""
        ...


class EngineThread:
    """One engine."""

    def __init__(  # what it is made of
        self,
        name: str,
        assembled: Assembled,
        executor: Executor,
        events: Events,
        tally: Tally,
        listener: Listener,
        *,
        promise_us: int,
        host_overhead_us: int,
    ) -> None:
        """`promise_us` bounds gaps; `host_overhead_us` is what a step takes beside the device."""
        self.name = name
        self.loop = EngineLoop(assembled.scheduler, executor, executor.clock, tuning=assembled.tuning)
        self.next_look_us: int | None = None
        """When somebody asks for its state next; None: nobody does."""
        self._assembled = assembled
        self._executor = executor
        executor.on_step = self._on_step
        self._events = events
        self._tally = tally
        self._listener = listener
        self._promise_us = promise_us
        # With a window, the host works while the device does.
        self._overhead_us = 0 if assembled.scheduler.depth else host_overhead_us
        self._commands: list[Command] = []
        self._calls: dict[str, Call] = {}
        """In the engine, by the engine's request id."""
        self._busy_until_us: int | None = None
        """When the step in flight ends; None while the engine waits for work."""
        self._seen: EngineState | None = None
        """The state for a look that falls into the step in flight."""
        self._seq = 0
        self._empty_plans = 0
        self._step_started_us = 0
        self._step_predicted_us = 0
        self._turning: Timer | None = None
        """The next turn, or the end of the step in flight."""
        self._boots = 1
        self.is_down = False
        """Whether its process is gone."""

    @property
    def idle(self) -> bool:
        """Whether it waits for work."""
        return self._busy_until_us is None

    @property
    def num_calls(self) -> int:
        """Requests in it."""
        return len(self._calls)

    def add(self, call: Call, request: Request) -> None:
        """Take a request in, after the step in flight."""
        self._calls[request.id] = call
        self._command(partial(self._add, call, request))

    def abort(self, request: Request) -> None:
        """Its client has gone: its blocks are free after the step in flight."""
        if self._calls.pop(request.id, None) is not None:
            self._executor.forget(request.id)
            self._command(lambda loop: loop.abort(request.id))

    def crash(self) -> None:
        """Its process ends: every answer breaks off, and nobody listens until `boot`."""
        self.is_down = True
        if self._turning is not None:
            self._turning.cancel()
        self._commands, self._busy_until_us, self._seen = [], None, None
        calls, self._calls = self._calls, {}
        for request_id, call in calls.items():
            self._executor.forget(request_id)
            self._listener.ended(call, Outcome.FAILED, self._events.now_us)

    def boot(self, assembled: Assembled) -> None:
        """A new process, with an empty cache and counters that begin anew."""
        self._boots += 1
        self.is_down = False
        self._assembled = assembled
        self.loop = EngineLoop(assembled.scheduler, self._executor, self._executor.clock, tuning=assembled.tuning)

    @property
    def derived(self) -> DerivedLimits:
        """What it derived from the promise."""
        return self._assembled.tuning.current.derived

    def state(self) -> EngineState:
        """What `/state` would say now."""
        if self._seen is None:
            return self._state()
        running_us = max(1, self._events.now_us - self._step_started_us)
        return replace(self._seen, step_running_us=running_us, step_predicted_us=self._step_predicted_us)

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        if self._busy_until_us is None:
            self._busy_until_us = self._events.now_us
            # What comes in the same instant goes into the same step.
            self._turning = self._events.last_at(self._events.now_us, self._turn)

    def _add(self, call: Call, request: Request, loop: EngineLoop) -> Emissions:
        problem = loop.add(request)
        if problem is not None:
            del self._calls[request.id]
            self._listener.impossible(call, problem)
        return Emissions()

    def _turn(self) -> None:
        """Take the commands, then run a step, or wait when there is nothing to run."""
        executor, now_us = self._executor, self._events.now_us
        executor.now_us = now_us
        while self._commands:
            commands, self._commands = self._commands, []
            for command in commands:
                self._deliver(command(self.loop), now_us)
        if not self.loop.has_work:
            self._busy_until_us = None
            return
        self._seen = None
        emissions = self.loop.step()
        while executor.now_us == now_us and not self._ran_dry():
            # The window has room: the next step is planned while the first one runs.
            emissions.extend(self.loop.step())
        ended_us = executor.now_us
        if ended_us == now_us:
            self._nothing_ran(emissions)
            return
        self._empty_plans = 0
        ended_us += self._overhead_us
        self._busy_until_us = ended_us
        self._turning = self._events.at(ended_us, partial(self._step_ended, emissions))

    def _ran_dry(self) -> bool:
        """Whether nothing is in flight, so that no time will pass."""
        return not len(self.loop.scheduler.window)

    def _nothing_ran(self, emissions: Emissions) -> None:
        now_us = self._events.now_us
        self._deliver(emissions, now_us)
        self._tally.empty_steps += 1
        self._empty_plans += 1
        if self._empty_plans > _MOST_EMPTY_PLANS:
            plan = self.loop.last_plan
            reason = plan.idle_reason if plan is not None else "unknown"
            raise Stuck(f"{self.name}: the scheduler plans nothing for the work it has ({reason}): please report it")
        self._busy_until_us = now_us + _LOOK_AGAIN_US
        self._turning = self._events.at(self._busy_until_us, self._turn)

    def _step_ended(self, emissions: Emissions) -> None:
        self._seen = None
        self._deliver(emissions, self._events.now_us)
        self._turn()

    def _on_step(self, plan: StepPlan, started_us: int, ended_us: int) -> None:
        """The executor begins a step: what the gate would see of it, and the timeline."""
        self._step_started_us, self._step_predicted_us = started_us, plan.predicted_us
        if self.next_look_us is not None and self.next_look_us <= ended_us + self._overhead_us:
            # The step is settled at once in here, and at its end out there: who looks in between sees its beginning.
            self._seen = self._state()
        scheduler = self.loop.scheduler
        self._tally.step(
            started_us,
            ended_us - started_us,
            running=scheduler.rows.num_running,
            waiting=len(scheduler.waiting),
            used_blocks=scheduler.pool.num_blocks - scheduler.pool.num_free,
            prefill=plan.prefill_tokens,
            decodes=plan.decode_requests,
            preempted=len(plan.preempted),
        )

    def _deliver(self, emissions: Emissions, now_us: int) -> None:
        """Hand out a step's tokens and ends."""
        ended: list[tuple[Call, Emission]] = []
        for part in emissions.parts:
            if isinstance(part, DecodedTokens):
                self._hand_out(part, now_us)
                singles: Iterable[Emission] = part.special.values()
            else:
                singles = part
            for emission in singles:
                call = self._calls.get(emission.request.id)
                if call is None:
                    continue  # its client left while the step ran
                if not isinstance(part, DecodedTokens):
                    self._hand_over(emission, call, now_us)
                if emission.outcome is not None:
                    ended.append((call, emission))
        for call, emission in ended:
            self._end(call, emission, now_us)

    def _hand_out(self, part: DecodedTokens, now_us: int) -> None:
        """One token each for those that decode: their gaps in bulk, since most are equal and few are too long."""
        gaps_us = part.gaps_us
        calls, names = self._calls, part.requests
        # The model's end is no token of the answer: its gap is none.
        ends = [index for index, one in part.special.items() if one.token_id is None]
        if ends:
            gaps_us = gaps_us.copy()
            gaps_us[ends] = 0
        for index in np.flatnonzero(gaps_us > self._promise_us).tolist():
            call = calls.get(names[index].id)
            if call is not None:
                call.times.gaps_over += 1
        if self._tally.counts(now_us):
            loads = None
            if len(self._tally.loads) > 1:
                loads = [call.sender.name if (call := calls.get(one.id)) is not None else "" for one in names]
            self._tally.gaps(gaps_us, loads)

    def _hand_over(self, emission: Emission, call: Call, now_us: int) -> None:
        """A token that came out of prefill: a first one, or the next after a preemption."""
        if emission.token_id is None:
            return
        if emission.gap_us is None:
            self._listener.began(call, now_us)
            return
        call.times.gaps_over += emission.gap_us > self._promise_us
        if self._tally.counts(now_us):
            self._tally.loads[call.sender.name].gaps.add(emission.gap_us)

    def _end(self, call: Call, emission: Emission, now_us: int) -> None:
        request, outcome = emission.request, emission.outcome
        assert outcome is not None, "asked for ends only"
        del self._calls[request.id]
        self._executor.forget(request.id)
        # The model's end is no token of the answer.
        call.times.gaps = max(0, request.num_output - (outcome is Outcome.STOP) - 1)
        call.times.output_tokens = request.num_output
        self._listener.ended(call, outcome, now_us)

    def _state(self) -> EngineState:
        self._seq += 1
        scheduler, told = self.loop.scheduler, self._assembled.tuning.current
        requests = tuple(map(request_state, scheduler.requests.values()))
        return EngineState(
            schema_version=SCHEMA_VERSION,
            boot_id=f"{self.name}/{self._boots}",
            seq=self._seq,
            phase="ready",
            max_length_tokens=scheduler.max_length_tokens,
            step=scheduler.step,
            pool=PoolState(
                block_tokens=scheduler.pool.block_tokens,
                total_blocks=scheduler.pool.num_blocks,
                free_blocks=scheduler.pool.num_free,
            ),
            running_requests=scheduler.rows.num_running,
            waiting_requests=len(scheduler.waiting),
            prefix=scheduler.prefix.state(),
            preemptions_total=scheduler.preemptions_total,
            derived=told.derived,
            step_cost=told.step_cost,
            prefill_cost=told.prefill_cost,
            decode_curve_us=told.decode_curve_us,
            decode_context_ps=told.decode_context_ps,
            requests=requests,
            finished=tuple(self.loop.finished),
        )
