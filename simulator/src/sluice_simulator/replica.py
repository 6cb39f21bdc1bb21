"""One pod in virtual time: the gate's own `Admission` before the engine's own `EngineLoop`.

Owns what `server.py` and `proxy.py` do in a pod, and nothing of what they decide: the door's timers, the way to the
engine and back. Start reading at `enter`; the engine's half is `engine_thread.py`, its state comes by `state_link.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sluice_engine.core.assemble import Assembled
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.state import DerivedLimits
from sluice_sidecar import refusals
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimates import fitting
from sluice_sidecar.estimates.estimate import Asked
from sluice_sidecar.estimates.prompt import PromptSize
from sluice_sidecar.retries.attempts import Attempt
from sluice_sidecar.telemetry.headroom import share_left
from sluice_simulator.call import Call
from sluice_simulator.engine_thread import EngineThread
from sluice_simulator.events import Events, Timer
from sluice_simulator.executor import Executor
from sluice_simulator.faults import Faults
from sluice_simulator.state_link import StateLink
from sluice_simulator.tally import Tally
from sluice_simulator.workload import prompt_of, text_of

# What the proxy answers when the engine's socket refuses it, or the connection breaks before the first token.
_ENGINE_GONE = refusals.unavailable(Reason.ENGINE_DEAD)
_ENGINE_ENDED = Refusal(Reason.ENGINE_FAILED, "The engine ended before it answered; send the request again.")


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What a pod is told beside the promise, and what its host adds."""

    inter_token_latency_us: int
    host_overhead_us: int
    """Of each step, outside the device."""
    poll_us: int
    told_factor: float
    faults: Faults
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
        self._executor = executor
        self._events = events
        self._tally = tally
        self._settings = settings
        self._held_up: dict[str, list[Timer]] = {}
        """What the gate will do about a call once its event loop gets on, by request id."""
        self._link: StateLink | None = None
        if gate is not None:
            self._link = StateLink(
                self.engine,
                gate,
                events,
                settings.faults,
                interval_us=settings.poll_us,
                told_factor=settings.told_factor,
                clock=self._clock,
            )

    @property
    def loop(self) -> EngineLoop:
        """The engine's own loop."""
        return self.engine.loop

    @property
    def derived(self) -> DerivedLimits:
        """What the engine derived from the promise."""
        return self.engine.derived

    @property
    def idle(self) -> bool:
        """Whether the engine waits for work."""
        return self.engine.idle

    def start(self, boot: Callable[[], Assembled]) -> None:
        """The engine is ready, and the gate has seen it. `boot` gives the core of one that restarts."""
        if self._link is not None:
            self._link.poll()
        for one in self._settings.faults.all:
            if one.kind == "EngineRestarts":
                self._events.at(one.from_us, self.engine.crash)
                self._events.at(one.until_us, lambda: self.engine.boot(boot()))

    def _clock(self) -> int:
        """The gate's own."""
        return self._settings.faults.gate_clock_us(self._events.now_us)

    def enter(self, call: Call) -> None:
        """Decide about an attempt."""
        self._when_awake(call, partial(self._enter, call))

    def _enter(self, call: Call) -> None:
        gate = self.gate
        if gate is None:
            if self.engine.is_down:
                self._refuse(call, _ENGINE_GONE)
            else:
                self._forward(call, None)
            return
        now_us = self._clock()
        gate.decisions.asked(call.request_id, "", "chat", now_us)
        if (refusal := gate.refuse_unavailable()) is not None:
            self._refuse(call, refusal)
            return
        cost = self.price(call)
        if isinstance(cost, Refusal):
            self._refuse(call, cost)
            return
        verdict = gate.enter(
            call.request_id,
            cost,
            now_us,
            partial(self._settled, call),
            terms=call.sender.config.terms,
            attempt=self._attempt(call),
        )
        if isinstance(verdict, Ticket):
            call.ticket = verdict
            moment = self._tally.timeline.at(self._events.now_us)
            moment.door = max(moment.door, gate.waiting)
            self._events.after(max(0, verdict.deadline_us - now_us), partial(self._door_closes, verdict))
        else:
            self._settled(call, verdict)

    @staticmethod
    def _attempt(call: Call) -> Attempt:
        tells = call.sender.config.retries.tells_attempt
        return Attempt(number=call.attempt if tells else 0, body_key=b"" if tells else b"r%d" % call.number)

    def _when_awake(self, call: Call, action: Callable[[], None]) -> None:
        """Do something of the gate's, once its event loop gets on."""
        now_us = self._events.now_us
        until_us = self._settings.faults.stalled_until_us(now_us)
        if self.gate is None or until_us <= now_us:
            action()
            return
        timer = self._events.at(until_us, partial(self._awake, call.request_id, action))
        self._held_up.setdefault(call.request_id, []).append(timer)

    def _awake(self, request_id: str, action: Callable[[], None]) -> None:
        # What was held up goes on in order, so this is the first.
        timers = self._held_up[request_id]
        del timers[0]
        if not timers:
            del self._held_up[request_id]
        action()

    def headroom(self) -> float:
        """The share of what is scarcest here, slots or blocks, that is still to be had: what a router goes by."""
        if self.gate is not None:
            return share_left(self.gate, self._clock())
        scheduler = self.loop.scheduler
        slots = 1 - self.engine.num_calls / scheduler.limits.max_sequences
        return min(slots, scheduler.pool.num_free / scheduler.pool.num_blocks)

    def leave(self, call: Call) -> None:
        """The client has gone: its blocks are free after the step in flight."""
        now_us = self._clock()
        for timer in self._held_up.pop(call.request_id, ()):
            timer.cancel()
        if call.request is not None:
            self.engine.abort(call.request)
        if self.gate is not None:
            if call.permit is not None:
                call.permit.close(now_us)
            elif call.ticket is not None:
                self.gate.leave(call.ticket, now_us)
            self.gate.decisions.ended(call.request_id, "client_left", now_us, None, call.times)

    def price(self, call: Call) -> Cost | Refusal:
        """What the gate takes a call to cost."""
        gate = self.gate
        assert gate is not None, "who prices is a gate"
        limits, pricing = gate.room.limits, gate.room.pricing
        assert limits is not None, "an available engine has told its limits"
        tokens, size = call.arrival.prompt_tokens, self._settings.bytes_per_token
        text = text_of(call.arrival, call.number)
        prompt = PromptSize(tokens=tokens, text=text)
        if size is not None:
            prompt = PromptSize(text_bytes=round(tokens * size), text=text)
        asked = Asked((prompt,), 1, call.arrival.max_tokens, "prompt")
        exact = None
        refusal = fitting.refuse(asked, limits)
        if refusal is None and fitting.worth_counting(asked, limits, pricing.ratio):
            exact = tokens
            refusal = fitting.refuse_counted(asked, limits, exact)
        if refusal is not None:
            return refusal
        return pricing.price(asked, limits, self._tenant(call), exact)

    @staticmethod
    def _tenant(call: Call) -> str:
        return call.sender.config.terms.tenant if call.arrival.tenant is None else call.arrival.tenant

    def _settled(self, call: Call, verdict: Permit | Refusal) -> None:
        if call.ticket is not None:
            self._tally.door_wait.add(self._clock() - call.ticket.arrived_us)
            call.ticket = None
        if isinstance(verdict, Refusal):
            self._refuse(call, verdict)
        else:
            self._forward(call, verdict)

    def _refuse(self, call: Call, refusal: Refusal) -> None:
        if self.gate is not None:
            self.gate.count(refusal)
            self.gate.decisions.ended(call.request_id, "refused", self._clock(), refusal, None)
        call.refused(refusal)

    def _door_closes(self, ticket: Ticket) -> None:
        assert self.gate is not None, "a ticket is a gate's"
        if ticket.verdict is None:
            self.gate.expire(ticket, self._clock())

    def _forward(self, call: Call, permit: Permit | None) -> None:
        now_us = self._events.now_us
        if permit is not None:
            call.permit = permit
            if self.engine.is_down:
                self._engine_refuses(call, permit)
                return
            permit.forwarded(self._clock())
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
            tenant=self._tenant(call),
            first_token_deadline_us=_after(call.times.arrived_us, terms.first_token_us),
            finish_deadline_us=_after(call.times.arrived_us, terms.finish_us),
        )
        self.engine.add(call, request)

    def _engine_refuses(self, call: Call, permit: Permit) -> None:
        """Nobody listens at the engine's socket any more: the gate looks at once, and says so."""
        assert self._link is not None, "a permit is a gate's"
        permit.close(self._clock())
        self._link.refused()
        self._refuse(call, _ENGINE_GONE)

    # What the engine tells.

    def began(self, call: Call, now_us: int) -> None:
        """The first token of an answer."""
        del now_us
        self._when_awake(call, partial(self._began, call))

    def _began(self, call: Call) -> None:
        call.first_token(self._events.now_us)
        if self.gate is not None and call.permit is not None:
            self.gate.room.first_token(call.permit, self._clock())
            self.gate.decisions.first_token(call.request_id, self._clock())

    def ended(self, call: Call, outcome: Outcome, now_us: int) -> None:
        """An answer came to its end."""
        del now_us
        self._when_awake(call, partial(self._ended, call, outcome))

    def _ended(self, call: Call, outcome: Outcome) -> None:
        now_us = self._clock()
        if call.permit is not None:
            call.permit.completed = outcome.is_answer
            call.permit.close(now_us)
        if outcome is Outcome.FAILED and call.times.first_us is None:
            self._refuse(call, _ENGINE_ENDED)
            return
        request_id, times = call.request_id, call.times
        call.ended(outcome, self._events.now_us)
        if self.gate is not None:
            went = "completed" if outcome.is_answer else "failed"
            self.gate.decisions.ended(request_id, went, now_us, None, times)

    def impossible(self, call: Call, problem: str) -> None:
        """The engine did not take a request in."""
        if call.permit is not None:
            call.permit.close(self._clock())
        self._refuse(call, Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, problem))


def _after(start_us: int, delay_us: int | None) -> int | None:
    return None if delay_us is None else start_us + delay_us
