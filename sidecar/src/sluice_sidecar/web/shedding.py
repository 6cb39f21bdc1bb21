"""Refusing in a storm: how little is done for a request that would be refused whatever it asks for.

Owns the rate of refusals and the last look at the door. Up to `EARLY_PER_S` each request is read and judged; above, one
that comes to a shut door is told so before its body is read; above `CANNED_PER_S` before its headers are. Else a storm
of retries takes the time of the streams it is refused for. Pure: the clock comes in with each call.
"""

from __future__ import annotations

from enum import IntEnum

from sluice_sidecar.admission import Admission
from sluice_sidecar.errors import BUSY_STATUS, Reason, Refusal

# What is read and judged costs about 0.4 ms: so many of them take a tenth of a core.
EARLY_PER_S = 250
# What is told at the door costs about 0.2 ms: with the others, a fifth.
CANNED_PER_S = 1_000
# A door that was shut a moment ago, with nobody gone since, still is.
_LOOK_KEPT_US = 20_000
_SECOND_US = 1_000_000


class Effort(IntEnum):
    """How much is done for a request that comes to a shut door."""

    FULL = 0
    EARLY = 1
    CANNED = 2


class Shedding:
    """Counts refusals for load, and says how the next one is given."""

    def __init__(self, admission: Admission, *, enforced: bool = True) -> None:
        self._admission = admission
        self.enforced = enforced
        """False where nothing is refused for load: each request is read, whatever comes."""
        self.early_total = 0
        self.canned_total = 0
        self._second = 0
        self._counts = (0, 0)
        """Refusals of the second before, and of this one."""
        self._shut: Reason | None = None
        self._looked_us = -_LOOK_KEPT_US
        self._seen = (-1, -1)

    def refused(self, refusal: Refusal, now_us: int) -> None:
        """A refusal was given."""
        if refusal.status == BUSY_STATUS:
            self._turn(now_us)
            self._counts = (self._counts[0], self._counts[1] + 1)

    def per_second(self, now_us: int) -> float:
        """Refusals of the last second: this second's, and the last one's as far as they lie within."""
        self._turn(now_us)
        before, now = self._counts
        return before * (1 - now_us % _SECOND_US / _SECOND_US) + now

    def effort(self, now_us: int) -> Effort:
        """How much is done now for a request that comes to a shut door."""
        if not self.enforced:
            return Effort.FULL
        rate = self.per_second(now_us)
        return Effort.CANNED if rate >= CANNED_PER_S else Effort.EARLY if rate >= EARLY_PER_S else Effort.FULL

    def early(self, now_us: int) -> Refusal | None:
        """The refusal of one whose body has not been read; None when it has to be."""
        if self.effort(now_us) is Effort.FULL or (refusal := self._refusal(now_us)) is None:
            return None
        self.early_total += 1
        return refusal

    def canned(self, now_us: int) -> Refusal | None:
        """The refusal of one whose headers have not been read, already counted; None when they have to be."""
        if self.effort(now_us) is not Effort.CANNED or (refusal := self._refusal(now_us)) is None:
            return None
        self.canned_total += 1
        self._admission.count(refusal)
        self.refused(refusal, now_us)
        return refusal

    def _refusal(self, now_us: int) -> Refusal | None:
        reason = self._shut_by(now_us)
        if reason is None:
            return None
        self._admission.demand.count_unread(now_us)
        return self._admission.refuse_busy(reason, "it refuses many requests a second now", now_us)

    def _shut_by(self, now_us: int) -> Reason | None:
        """Why the smallest of requests would be refused for load; None when it may not be."""
        admission = self._admission
        seen = (admission.admitted_total, admission.room.ledger.releases_total)
        if seen != self._seen or now_us - self._looked_us >= _LOOK_KEPT_US:
            self._seen, self._looked_us = seen, now_us
            reason = admission.closed_by(now_us)
            # No capacity at all is another answer, and as cheap.
            self._shut = None if reason is admission.unavailable else reason
        return self._shut

    def _turn(self, now_us: int) -> None:
        second = now_us // _SECOND_US
        if second != self._second:
            self._counts = (self._counts[1] if second == self._second + 1 else 0, 0)
            self._second = second
