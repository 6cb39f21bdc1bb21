"""Those who are refused for load and come back: who is here again, how many may be, and when they are told to come.

Joins `attempts`, `retry_budget` and `retry_after` for the admission, and words the refusals that say when. Pure: the
clock comes in with each call. Must not know what there is room for, but for the time in which so many are let in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sluice_sidecar import refusals
from sluice_sidecar.capacity.look import Held
from sluice_sidecar.errors import RateLimit, Refusal
from sluice_sidecar.retries.attempts import Attempt, Attempts
from sluice_sidecar.retries.retry_after import LEAST_SPREAD_US, LEAST_US, RetryAfter
from sluice_sidecar.retries.retry_budget import RetryBudget


class Returning:
    """The refused, as far as they come back."""

    def __init__(
        self, budget_percent: int, time_for: Callable[[int, int], int | None], draw: Callable[[int, int], int]
    ) -> None:
        """`time_for(n, now_us)`: how long n requests take to be let in; `draw(lo, hi)`: a random number between."""
        self._time_for = time_for
        self._draw = draw
        self.attempts = Attempts()
        self.budget = RetryBudget(budget_percent)
        self.retry_after = RetryAfter(draw)
        self.verdicts: Counter[str] = Counter()
        """Attempts that were retries, by verdict."""

    def counted(self, attempt: Attempt, now_us: int) -> Attempt:
        """The attempt, with the number that it has by what is remembered here."""
        return replace(attempt, number=self.attempts.number(attempt, now_us))

    def admitted(self, attempt: Attempt, tokens: int, now_us: int) -> None:
        """It was let in, with so much work."""
        is_retry = attempt.number > 0
        self.verdicts["admitted"] += is_retry
        self.budget.admitted(tokens, now_us, is_retry=is_retry)

    def may_return(self, attempt: Attempt, now_us: int) -> None:
        """It got no answer, refused or not, told to or not: the same body may be here again."""
        self.attempts.turned_away(attempt, now_us)

    def refused(self, attempt: Attempt, now_us: int) -> None:
        """It was refused for load."""
        self.may_return(attempt, now_us)
        self.verdicts["refused"] += attempt.number > 0

    def busy(self, held: Held, service_class: str, now_us: int) -> Refusal:
        """The refusal for what holds a request, and when it is told to come back, if at all."""
        retry_us = self.retry_after.delay_us(held.wait_us, lambda count: self._time_for(count, now_us), now_us)
        return refusals.busy(held, retry_us, is_pointless=self.budget.closed_to(service_class, now_us))

    def over_quota(self, quota: RateLimit, tokens: int) -> Refusal:
        """The refusal for a quota; not before it has room again, whatever else is said of when to come back."""
        wait_us = max(LEAST_US, quota.wait_us)
        return refusals.over_quota(quota, tokens, self._draw(wait_us, wait_us + LEAST_SPREAD_US))
