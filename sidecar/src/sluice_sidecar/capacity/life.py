"""The engine's life, judged from what polls of it came to: loading, ready, dead, hung; and how old its state is.

Owns the last state and since when the engine refuses or is silent. Pure, so that a simulator feeds it faults; how the
engine is asked is `engines/`. Liveness fails on positive evidence only; a long silence of an engine that was ready is
such evidence (docs/decisions/0006).
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.core.state import EngineState, is_readable
from sluice_sidecar.errors import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an engine may be out of reach before something is said of it. The defaults are for Sluice's own."""

    dead_after_us: int = 10_000_000
    """A socket that refuses for this long, after it had been up, is a dead process and not a restart in progress."""
    silent_after_us: int = 10_000_000
    """No answer for this long is not load: the engine's server has its own thread, which no step holds up."""
    wedged_after_us: int = 60_000_000
    """So long that no swapping disk and no debugger's glance ends a process that would have come back."""
    frozen_after_us: int = 0
    """How long a working engine may go without a change in what it says before that counts as old."""


class EngineLife:
    """What is known of the engine: each poll tells it how the poll ended, and when it had begun."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self.state: EngineState | None = None
        self.draining = False
        self._version: tuple[str, int, int] | None = None
        self._changed_us = 0
        """When the poll began that first saw the state as it is."""
        self._refused_since_us: int | None = None
        self._silent_since_us: int | None = None
        """When the first of the polls began that have had no answer since."""

    # How a poll ended.

    def answered(self, state: EngineState, asked_us: int) -> int | None:
        """It told its state: as of when that is true, None where nobody may rely on it."""
        self._silent_since_us = None
        if not is_readable(state.schema_version):
            return None
        self._refused_since_us = None
        self.state = state
        # While a step is in flight nothing new is published, and the time that it has run is another at each look.
        version = (state.boot_id, state.seq, state.step_running_us)
        if version != self._version:
            self._version, self._changed_us = version, asked_us
        if state.phase != "ready":
            return None
        # A document that stands still, with work in it, is as old as its last change.
        works = bool(state.running_requests or state.waiting_requests)
        frozen = works and asked_us - self._changed_us >= self._patience.frozen_after_us
        return self._changed_us if frozen else asked_us

    def refused(self, asked_us: int, now_us: int) -> bool:
        """Nobody listens; whether that is new."""
        self.unanswered(asked_us)
        if self._refused_since_us is not None:
            return False
        self._refused_since_us = now_us
        return self.state is not None

    def unanswered(self, asked_us: int) -> None:
        """No answer in time: slow, not dead; the state in use grows old."""
        if self._silent_since_us is None:
            self._silent_since_us = asked_us

    def unreadable(self) -> None:
        """It answered with what is no state: it lives, and the state in use grows old."""
        self._silent_since_us = None

    # What that means.

    @property
    def refuses(self) -> bool:
        """Whether the last that was heard is a refused connection."""
        return self._refused_since_us is not None

    def silent_us(self, now_us: int) -> int:
        """How long polls have gone unanswered; 0 while the last one was answered."""
        return 0 if self._silent_since_us is None else now_us - self._silent_since_us

    def unavailable(self, now_us: int, *, has_limits: bool) -> Reason | None:
        """Why no capacity exists; None when the engine can serve."""
        if self.draining:
            return Reason.DRAINING
        if self.state is None:
            return Reason.ENGINE_LOADING
        if self.refuses or self.state.hung or self.state.phase == "failed":
            return Reason.ENGINE_DEAD
        if self.state.phase != "ready" or not has_limits:
            return Reason.ENGINE_LOADING
        return Reason.ENGINE_DEAD if self.silent_us(now_us) > self._patience.silent_after_us else None

    def start_problem(self) -> str | None:
        """What the start still waits for; None once the engine is ready. For the engine's startup probe."""
        if self.state is None or self.refuses:
            return "the engine has not opened its socket yet"
        if self.state.phase == "failed":
            return f"failed: {self.state.failure}"
        if self.state.phase == "loading":
            loading = self.state.loading
            if loading is None:
                return f"loading{f': {self.state.failure}' if self.state.failure else ''}"
            percent = "" if loading.percent is None else f" {loading.percent} %"
            return f"loading: {loading.stage}{percent}"
        return None

    def life_problem(self, now_us: int) -> str | None:
        """Positive evidence that the engine must be restarted; None without any. For its liveness probe."""
        if self.state is None:
            return None
        if self.state.phase == "failed":
            return f"failed: {self.state.failure}"
        if self.state.hung:
            return f"a step has run for {self.state.step_running_us // 1_000_000} s"
        since = self._refused_since_us
        if since is not None and now_us - since > self._patience.dead_after_us:
            return f"its socket has refused connections for {(now_us - since) // 1_000_000} s"
        # One that loads may be busy in a library that lets no other thread run.
        if self.state.phase == "ready" and self.silent_us(now_us) > self._patience.wedged_after_us:
            return f"it has answered nothing for {self.silent_us(now_us) // 1_000_000} s"
        return None
