"""The way of one engine's state to its gate: the gate's own `EngineLife`, fed with what the faults leave of each poll.

Owns the poll in virtual time, as `engines/sluice.py` does in a pod. Must not know requests.
Start reading at `StateLink.poll`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sluice_engine import codec
from sluice_engine.core.state import EngineState
from sluice_engine.errors import InvalidConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.life import EngineLife
from sluice_sidecar.errors import Reason
from sluice_simulator.engine_thread import EngineThread
from sluice_simulator.events import Events
from sluice_simulator.faults import Faults, spoilt

# What the gate allows a poll.
_POLL_TIMEOUT_US = 1_000_000


class StateLink:
    """What one gate hears of its engine."""

    def __init__(  # what it stands between
        self,
        engine: EngineThread,
        gate: Admission,
        events: Events,
        faults: Faults,
        *,
        interval_us: int,
        told_factor: float,
        clock: Callable[[], int],
    ) -> None:
        """`told_factor`: the step times that the gate is told are so many times those that the engine knows."""
        self.life = EngineLife()
        self._engine = engine
        self._gate = gate
        self._events = events
        self._faults = faults
        self._interval_us = interval_us
        self._told_factor = told_factor
        self._clock = clock
        self._frozen: EngineState | None = None
        self._preemptions_before = 0
        """What the counter had come to when it was reset."""

    def poll(self) -> None:
        """Ask for the state, and again after the interval."""
        asked_us, now_us = self._clock(), self._events.now_us
        if self._engine.is_down:
            self.refused()
            self._again(self._interval_us)
        elif self._faults.active(now_us, "StateHangs"):
            self._events.after(_POLL_TIMEOUT_US, partial(self._timed_out, asked_us))
        elif (delay := self._faults.active(now_us, "StateDelayed")) is not None:
            self._again(delay.by_us)
            self._events.after(delay.by_us, partial(self._take, self._state(), asked_us))
        elif (fault := self._faults.active(now_us, "StateFails", "StateNaN", "StateMissing")) is not None:
            self._read(spoilt(fault.kind, codec.encode(self._state())), asked_us)
            self._again(self._interval_us)
        else:
            self._take(self._state(), asked_us)
            self._again(self._interval_us)

    def refused(self) -> None:
        """Nobody listens at the engine's socket."""
        self.life.refused(self._clock(), self._clock())
        self._settle()

    def _again(self, after_us: int) -> None:
        self._engine.next_look_us = self._events.now_us + after_us
        self._events.after(after_us, self.poll)

    def _timed_out(self, asked_us: int) -> None:
        self.life.unanswered(asked_us)
        self._settle()
        self.poll()

    def _read(self, document: object, asked_us: int) -> None:
        try:
            state = codec.decode(EngineState, document, "state", ignore_unknown=True)
        except InvalidConfig:
            self.life.unreadable()
            self._settle()
        else:
            self._take(state, asked_us)

    def _take(self, state: EngineState, asked_us: int) -> None:
        as_of_us = self.life.answered(state, asked_us)
        if as_of_us is not None:
            self._gate.observe(state, as_of_us, self._clock())
        self._settle()

    def _settle(self) -> None:
        self._gate.set_unavailable(self.unavailable(), self._clock())

    def unavailable(self) -> Reason | None:
        """Why no capacity exists."""
        return self.life.unavailable(self._clock(), has_limits=self._gate.room.limits is not None)

    def _state(self) -> EngineState:
        now_us = self._events.now_us
        if self._faults.active(now_us, "StateFrozen"):
            if self._frozen is None:
                self._frozen = self._told(self._engine.state())
            return self._frozen
        self._frozen = None
        return self._told(self._engine.state())

    def _told(self, state: EngineState) -> EngineState:
        if self._faults.active(self._events.now_us, "CountersReset"):
            self._preemptions_before = state.preemptions_total
        if self._preemptions_before:
            left = max(0, state.preemptions_total - self._preemptions_before)
            state = replace(state, preemptions_total=left)
        return state if self._told_factor == 1.0 else _with_times(state, self._told_factor)


def _with_times(state: EngineState, factor: float) -> EngineState:
    """The same state of an engine whose table says so many times as much."""

    def times(number: int) -> int:
        return max(1, round(number * factor))

    step, prefill = state.step_cost, state.prefill_cost
    return replace(
        state,
        step_predicted_us=round(state.step_predicted_us * factor),
        step_cost=None
        if step is None
        else replace(
            step,
            fixed_us=times(step.fixed_us),
            decode_us=times(step.decode_us),
            per_prefill_token_ns=times(step.per_prefill_token_ns),
        ),
        prefill_cost=None
        if prefill is None
        else replace(
            prefill,
            per_token_ns=times(prefill.per_token_ns),
            per_prior_pair_ps=round(prefill.per_prior_pair_ps * factor),
        ),
        decode_curve_us=tuple((batch, times(us)) for batch, us in state.decode_curve_us),
        decode_context_ps=times(state.decode_context_ps),
    )
