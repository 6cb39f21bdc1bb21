"""How far the engine's state can be trusted: how old it is, and what is wrong with it or with the clock.

Owns the time as of which the state in use is true, and a count of what was found wrong. How a poll ended is `life`'s
to judge. Pure: the clock comes in with each call.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from sluice_engine.core.state import EngineState
from sluice_sidecar.telemetry.state import Freshness

StateFault = Literal["missing", "reset", "clock_jump"]
STATE_FAULTS: tuple[StateFault, ...] = get_args(StateFault)
"""missing: a ready engine does not tell its pool, limits or step times. reset: it started anew between two polls.
clock_jump: the gate's clock went back, or it did not run for a while."""

# Polls come five times a second and time out after one: a gate that has not looked for this long was not running.
STOPPED_US = 30_000_000


class Sight:
    """What the gate sees of the engine."""

    def __init__(self, *, stale_after_us: int, blind_after_us: int) -> None:
        self._stale_after_us = stale_after_us
        self._blind_after_us = blind_after_us
        self._as_of_us: int | None = None
        self._boot_id, self._seq = "", 0
        self._looked_us: int | None = None
        self.faults: Counter[StateFault] = Counter()

    def looked(self, now_us: int) -> bool:
        """A poll ended, whatever it brought; whether the gate had not run for a while before."""
        since_us, self._looked_us = self._looked_us, now_us
        if since_us is None or 0 <= now_us - since_us <= STOPPED_US:
            return False
        self.faults["clock_jump"] += 1
        return True

    def knows(self, state: EngineState, as_of_us: int) -> bool:
        """Whether this is the state in use, which is then as old as `as_of_us` says."""
        if self._as_of_us is None or (state.boot_id, state.seq) != (self._boot_id, self._seq):
            return False
        if as_of_us > self._as_of_us:
            return False
        self._as_of_us = as_of_us
        return True

    def saw(self, state: EngineState, as_of_us: int, now_us: int) -> int:
        """A state came that can be used; how long after the last one it is true."""
        before_us = as_of_us if self._as_of_us is None else self._as_of_us
        if self._boot_id not in {"", state.boot_id}:
            self.faults["reset"] += 1
        self._boot_id, self._seq = state.boot_id, state.seq
        self._as_of_us = min(as_of_us, now_us)
        return self._as_of_us - before_us

    def missed(self) -> None:
        """A state came that lacks what a decision needs: the last one stays, and grows old. Missing is not zero."""
        self.faults["missing"] += 1

    def age_us(self, now_us: int) -> int | None:
        """Age of the state in use; None before the first."""
        if self._as_of_us is None:
            return None
        # A clock that went back says nothing about the age: it is counted from here.
        self._as_of_us = min(self._as_of_us, now_us)
        return now_us - self._as_of_us

    def freshness(self, now_us: int) -> Freshness:
        """How far it can be trusted."""
        age_us = self.age_us(now_us)
        if age_us is None:
            return "none"
        if age_us > self._blind_after_us:
            return "blind"
        return "stale" if age_us > self._stale_after_us else "fresh"
