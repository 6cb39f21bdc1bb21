"""How much of the capacity retries may take while there is not enough for all.

Owns the shares of what was let in, and when each class was last refused for capacity. Shares are of work (tokens), not
of requests. Without such a bound the retries of a short spike keep a pod overloaded long after it. Pure: the clock
comes in with each call. Must not know how a retry is told.
"""

from __future__ import annotations

import math

from sluice_sidecar.errors import Reason, Refusal

# Long enough for a share of few, large requests; short enough that a spike is forgotten when its retries are over.
HORIZON_US = 30_000_000
# A retry is refused for the budget only while its class lacks capacity: it was refused for it no longer ago than this.
SHORT_OF_CAPACITY_US = 10_000_000
# However little is let in, one retry in this time is: a pod whose streams last for minutes has no share to speak of.
LEAST_EVERY_US = 10_000_000
SPENT = Refusal(
    Reason.RETRY_BUDGET,
    "The model is busy, and retries have had their share of it; do not send this request again by itself.",
)


class RetryBudget:
    """Work let in of late, and how much of it was retries: sums that fade with the horizon."""

    def __init__(self, percent: int) -> None:
        self._percent = percent
        self._admitted = 0.0
        self._retried = 0.0
        self._as_of_us = 0
        self._last_retry_us: int | None = None
        self._refused_us: dict[str, int] = {}

    def configure(self, percent: int) -> None:
        """Another share from now on; 100: no bound."""
        self._percent = percent

    def admitted(self, tokens: int, now_us: int, *, is_retry: bool) -> None:
        """Work was let in."""
        self._fade(now_us)
        self._admitted += tokens
        if is_retry:
            self._retried += tokens
            self._last_retry_us = now_us

    def refused(self, service_class: str, now_us: int) -> None:
        """A request of this class was refused since there was no room for it. For the budget itself does not count."""
        self._refused_us[service_class] = now_us

    def closed_to(self, service_class: str, now_us: int) -> bool:
        """Whether retries of this class are refused now: the budget is spent, and the class lacks capacity."""
        refused_us = self._refused_us.get(service_class)
        if refused_us is None or now_us - refused_us > SHORT_OF_CAPACITY_US:
            return False
        return self.spent(now_us)

    def spent(self, now_us: int) -> bool:
        """Whether retries have had their share of late."""
        if self._percent in {0, 100}:
            return self._percent == 0
        if self._last_retry_us is None or now_us - self._last_retry_us >= LEAST_EVERY_US:
            return False
        return self._retried * 100 >= self._admitted * self._percent

    def share(self) -> float:
        """The share of retries in what was let in of late; 0 when nothing was."""
        return self._retried / self._admitted if self._admitted > 0 else 0.0

    def _fade(self, now_us: int) -> None:
        factor = math.exp(-max(0, now_us - self._as_of_us) / HORIZON_US)
        self._admitted *= factor
        self._retried *= factor
        self._as_of_us = max(self._as_of_us, now_us)
