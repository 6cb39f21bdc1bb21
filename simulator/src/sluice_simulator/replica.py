"""One pod in virtual time: the gate's own `Admission` before the engine's own `EngineLoop`.

Owns what `server.py`, `proxy.py` and `service.py` do in a pod, and nothing of what they decide: the door's timers, the
commands that wait for a step's end, the poll of the engine's state. Start reading at `enter` and `_turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sluice_engine.core.assemble import Assembled
from sluice_engine.core.emissions import DecodedTokens, Emission, Emissions
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.state import SCHEMA_VERSION, DerivedLimits, EngineState, PoolState, request_state
from sluice_sidecar import estimate
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimate import Asked, PromptSize
from sluice_sidecar.ledger import Cost, Permit
from sluice_simulator.call import Call
from sluice_simulator.errors import Stuck
from sluice_simulator.events import Events
from sluice_simulator.executor import Executor
from sluice_simulator.tally import Tally
from sluice_simulator.workload import prompt_of

# An engine whose plan is empty while work exists looks again after this long: a pod's would spin.
_LOOK_AGAIN_US = 1_000
# So often in a row without anything else happening, it never will.
_MOST_EMPTY_PLANS = 60_000

Command = Callable[[EngineLoop], Emissions]


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What a pod is told beside the promise, and what its host adds."""

    inter_token_latency_us: int
    host_overhead_us: int
    """Of each step, outside the device."""
    poll_us: int
    bytes_per_token: float | None
    """What clients send is text of this many bytes a token, whose length the gate has to guess; None: token ids."""


class Replica:
    """One pod."""

    def __init__(  # what a pod is made of
        self,
        name: str,
        assembled: Assembled,
        executor: Executor,
        events: Events,
        tally: Tally,
        gate: Admission | None,
        settings: PodSettings,
    ) -> None:
        self.name = name
        self.gate = gate
        self.loop = EngineLoop(assembled.scheduler, executor, executor.clock, tuning=assembled.tuning)
        self._assembled = assembled
        self._executor = executor
        executor.on_step = self._on_step
        self._events = events
        self._tally = tally
        self._settings = settings
        self._commands: list[Command] = []
        self._calls: dict[str, Call] = {}
        """In the engine, by the engine's request id."""
        self._busy_until_us: int | None = None
        """When the step in flight ends; None while the engine waits for work."""
        self._next_poll_us = 0
        self._seen: EngineState | None = None
        """The state of the poll that falls into the step in flight."""
        self._seq = 0
        self._empty_plans = 0
        self._step_started_us = 0
        self._step_predicted_us = 0
        self._promise_us = settings.inter_token_latency_us
        # With a window, the host works while the device does.
        self._overhead_us = 0 if assembled.scheduler.depth else settings.host_overhead_us

    @property
    def derived(self) -> DerivedLimits:
        """What the engine derived from the promise."""
        return self._assembled.tuning.current.derived

    @property
    def idle(self) -> bool:
        """Whether the engine waits for work."""
        return self._busy_until_us is None

    def start(self) -> None:
        """The engine is ready, and the gate has seen it."""
        if self.gate is not None:
            self._poll()

    # The gate.

    def enter(self, call: Call) -> None:
        """Decide about an attempt."""
        gate = self.gate
        if gate is None:
            self._forward(call, None)
            return
        now_us = self._events.now_us
        gate.decisions.asked(call.request_id, "", "chat", now_us)
        if (refusal := gate.refuse_unavailable()) is not None:
            self._refuse(call, refusal)
            return
        cost = self._price(call, gate)
        if isinstance(cost, Refusal):
            self._refuse(call, cost)
            return
        bound_us = call.sender.config.terms.bound_us
        verdict = gate.enter(call.request_id, cost, now_us, partial(self._settled, call), bound_us=bound_us)
        if isinstance(verdict, Ticket):
            call.ticket = verdict
            self._tally.timeline.at(now_us).door = max(self._tally.timeline.at(now_us).door, gate.waiting)
            self._events.at(max(now_us, verdict.deadline_us), partial(self._door_closes, verdict))
        else:
            self._settled(call, verdict)

    def headroom(self) -> float:
        """The share of what is scarcest here, slots or blocks, that is still to be had: what a router goes by."""
        gate, scheduler = self.gate, self.loop.scheduler
        if gate is None or gate.room.limits is None:
            slots = 1 - len(self._calls) / scheduler.limits.max_sequences
            return min(slots, scheduler.pool.num_free / scheduler.pool.num_blocks)
        now_us, room = self._events.now_us, gate.room
        slots = 1 - (len(room.ledger.entries) + gate.waiting) / room.sequences(now_us)
        return min(slots, 1 - room.ledger_blocks() / max(1, room.ceiling_blocks(now_us)))

    def leave(self, call: Call) -> None:
        """The client has gone: its blocks are free after the step in flight."""
        now_us = self._events.now_us
        request = call.request
        if request is not None and self._calls.pop(request.id, None) is not None:
            self._executor.forget(request.id)
            self._command(lambda loop: loop.abort(request.id))
        if self.gate is not None:
            if call.permit is not None:
                call.permit.close(now_us)
            elif call.ticket is not None:
                self.gate.leave(call.ticket, now_us)
            self.gate.decisions.ended(call.request_id, "client_left", now_us, None, call.times)

    def _price(self, call: Call, gate: Admission) -> Cost | Refusal:
        limits, ratio = gate.room.limits, gate.room.ratio
        assert limits is not None, "an available engine has told its limits"
        tokens, size = call.arrival.prompt_tokens, self._settings.bytes_per_token
        prompt = PromptSize(tokens=tokens) if size is None else PromptSize(text_bytes=round(tokens * size))
        asked = Asked((prompt,), 1, call.arrival.max_tokens, "prompt")
        problem = estimate.too_long_an_answer(asked, limits) or estimate.hopeless(asked, limits)
        exact = None
        if problem is None and estimate.worth_counting(asked, limits, ratio):
            exact = tokens
            problem = estimate.impossible(asked, limits, exact)
        if problem is not None:
            return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, problem)
        return estimate.price(asked, limits, ratio, exact)

    def _settled(self, call: Call, verdict: Permit | Refusal) -> None:
        if call.ticket is not None:
            self._tally.door_wait.add(self._events.now_us - call.ticket.arrived_us)
            call.ticket = None
        if isinstance(verdict, Refusal):
            self._refuse(call, verdict)
        else:
            self._forward(call, verdict)

    def _refuse(self, call: Call, refusal: Refusal) -> None:
        if self.gate is not None:
            self.gate.count(refusal)
            self.gate.decisions.ended(call.request_id, "refused", self._events.now_us, refusal, None)
        call.refused(refusal)

    def _door_closes(self, ticket: Ticket) -> None:
        assert self.gate is not None, "a ticket is a gate's"
        if ticket.verdict is None:
            self.gate.expire(ticket, self._events.now_us)

    def _forward(self, call: Call, permit: Permit | None) -> None:
        now_us = self._events.now_us
        if permit is not None:
            permit.forwarded(now_us)
            call.permit = permit
        arrival, terms = call.arrival, call.sender.config.terms
        request_id = f"{call.request_id}/0"
        call.request = request = Request(
            id=request_id,
            tokens=prompt_of(arrival, call.number),
            num_prompt=arrival.prompt_tokens,
            sampling=self._executor.expect(
                request_id, arrival.prompt_tokens, arrival.output_tokens, arrival.max_tokens
            ),
            arrival_us=now_us - arrival.waited_us,
            gate_id=call.request_id,
            priority=terms.priority() if arrival.priority is None else arrival.priority,
            tenant=terms.tenant if arrival.tenant is None else arrival.tenant,
            first_token_deadline_us=_after(call.times.arrived_us, terms.first_token_us),
            finish_deadline_us=_after(call.times.arrived_us, terms.finish_us),
        )
        self._calls[request_id] = call
        self._command(partial(self._add, call, request))

    # The engine's thread.

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        if self._busy_until_us is None:
            self._busy_until_us = self._events.now_us
            # What comes in the same instant goes into the same step.
            self._events.last_at(self._events.now_us, self._turn)

    def _add(self, call: Call, request: Request, loop: EngineLoop) -> Emissions:
        problem = loop.add(request)
        if problem is not None:
            del self._calls[request.id]
            if call.permit is not None:
                call.permit.close(self._events.now_us)
            self._refuse(call, Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, problem))
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
        self._events.at(ended_us, partial(self._step_ended, emissions))

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
        self._events.at(self._busy_until_us, self._turn)

    def _step_ended(self, emissions: Emissions) -> None:
        self._seen = None
        self._deliver(emissions, self._events.now_us)
        self._turn()

    def _on_step(self, plan: StepPlan, started_us: int, ended_us: int) -> None:
        """The executor begins a step: what the gate would see of it, and the timeline."""
        self._step_started_us, self._step_predicted_us = started_us, plan.predicted_us
        if self.gate is not None and self._next_poll_us <= ended_us + self._overhead_us:
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
            call.first_token(now_us)
            if self.gate is not None and call.permit is not None:
                self.gate.room.first_token(call.permit, now_us)
                self.gate.decisions.first_token(call.request_id, now_us)
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
        if call.permit is not None:
            call.permit.completed = outcome.is_answer
            call.permit.close(now_us)
        call.ended(outcome, now_us)
        if self.gate is not None:
            call.times.output_tokens = request.num_output
            went = "completed" if outcome.is_answer else "failed"
            self.gate.decisions.ended(call.request_id, went, now_us, None, call.times)

    # What the gate sees of the engine.

    def _poll(self) -> None:
        assert self.gate is not None, "who polls is a gate"
        now_us = self._events.now_us
        self._next_poll_us = now_us + self._settings.poll_us
        if self._seen is None:
            state = self._state()
        else:
            running_us = max(1, now_us - self._step_started_us)
            state = replace(self._seen, step_running_us=running_us, step_predicted_us=self._step_predicted_us)
        self.gate.observe(state, now_us, now_us)
        self.gate.set_unavailable(None, now_us)
        self._events.at(self._next_poll_us, self._poll)

    def _state(self) -> EngineState:
        self._seq += 1
        scheduler, told = self.loop.scheduler, self._assembled.tuning.current
        requests = tuple(map(request_state, scheduler.requests.values()))
        return EngineState(
            schema_version=SCHEMA_VERSION,
            boot_id=self.name,
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
            preemptions_total=scheduler.preemptions_total,
            derived=told.derived,
            step_cost=told.step_cost,
            prefill_cost=told.prefill_cost,
            decode_curve_us=told.decode_curve_us,
            requests=requests,
            finished=tuple(self.loop.finished),
        )


def _after(start_us: int, delay_us: int | None) -> int | None:
    return None if delay_us is None else start_us + delay_us
