"""One pod in virtual time: the gate's own `Admission` before the engine's own `EngineLoop`.

Owns what `server.py` and `proxy.py` do in a pod, and nothing of what they decide: the door's timers, the way to the
engine and back, the poll of its state. Start reading at `enter`; the engine's half is `engine_thread.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sluice_engine.core.assemble import Assembled
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.state import DerivedLimits
from sluice_sidecar import estimate
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimate import Asked, PromptSize
from sluice_sidecar.ledger import Cost, Permit
from sluice_simulator.call import Call
from sluice_simulator.engine_thread import EngineThread
from sluice_simulator.events import Events
from sluice_simulator.executor import Executor
from sluice_simulator.tally import Tally
from sluice_simulator.workload import prompt_of


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
        self.gate = gate
        self.engine = EngineThread(
            name,
            assembled,
            executor,
            events,
            tally,
            self,
            promise_us=settings.inter_token_latency_us,
            host_overhead_us=settings.host_overhead_us,
        )
        self._tuning = assembled.tuning
        self._executor = executor
        self._events = events
        self._tally = tally
        self._settings = settings

    @property
    def loop(self) -> EngineLoop:
        """The engine's own loop."""
        return self.engine.loop

    @property
    def derived(self) -> DerivedLimits:
        """What the engine derived from the promise."""
        return self._tuning.current.derived

    @property
    def idle(self) -> bool:
        """Whether the engine waits for work."""
        return self.engine.idle

    def start(self) -> None:
        """The engine is ready, and the gate has seen it."""
        if self.gate is not None:
            self._poll()

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
        verdict = gate.enter(
            call.request_id, cost, now_us, partial(self._settled, call), terms=call.sender.config.terms
        )
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
            slots = 1 - self.engine.num_calls / scheduler.limits.max_sequences
            return min(slots, scheduler.pool.num_free / scheduler.pool.num_blocks)
        now_us, room = self._events.now_us, gate.room
        slots = 1 - (len(room.ledger.entries) + gate.waiting) / room.sequences(now_us)
        return min(slots, 1 - room.ledger_blocks() / max(1, room.ceiling_blocks(now_us)))

    def leave(self, call: Call) -> None:
        """The client has gone: its blocks are free after the step in flight."""
        now_us = self._events.now_us
        if call.request is not None:
            self.engine.abort(call.request)
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
        self.engine.add(call, request)

    # What the engine tells.

    def began(self, call: Call, now_us: int) -> None:
        """The first token of an answer."""
        if self.gate is not None and call.permit is not None:
            self.gate.room.first_token(call.permit, now_us)
            self.gate.decisions.first_token(call.request_id, now_us)

    def ended(self, call: Call, outcome: Outcome, now_us: int) -> None:
        """An answer came to its end."""
        if call.permit is not None:
            call.permit.completed = outcome.is_answer
            call.permit.close(now_us)
        call.ended(outcome, now_us)
        if self.gate is not None:
            went = "completed" if outcome.is_answer else "failed"
            self.gate.decisions.ended(call.request_id, went, now_us, None, call.times)

    def impossible(self, call: Call, problem: str) -> None:
        """The engine did not take a request in."""
        if call.permit is not None:
            call.permit.close(self._events.now_us)
        self._refuse(call, Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, problem))

    def _poll(self) -> None:
        assert self.gate is not None, "who polls is a gate"
        now_us = self._events.now_us
        next_us = self.engine.next_look_us = now_us + self._settings.poll_us
        self.gate.observe(self.engine.state(), now_us, now_us)
        self.gate.set_unavailable(None, now_us)
        self._events.at(next_us, self._poll)


def _after(start_us: int, delay_us: int | None) -> int | None:
    return None if delay_us is None else start_us + delay_us
