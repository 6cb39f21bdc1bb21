"""Keeps an engine's limits true while its step times are learned.

Owns the current derivation. Steps are told to it as they settle; every few seconds, if the step times have moved, the
limits are derived again and the scheduler obeys them from its next step on. Feasibility has a margin either way, so
that a promise at the edge does not come and go with the noise. Knows no clock: the time of a step comes with it.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice_engine.core.derivation import Derivation
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.refine import RefinedTable
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import StepTable

REFRESH_US = 5_000_000
# A promise that was feasible stays so while it would be with a tenth more time, and one that was not becomes so once it
# would be with a twentieth less.
LEFT_PERCENT, REACHED_PERCENT = 110, 95


class Tuning:
    """What an engine says of itself, as of now."""

    def __init__(
        self,
        scheduler: Scheduler,
        current: Derivation,
        again: Callable[[int], Derivation],
    ) -> None:
        """`again(percent)`: derive by the scheduler's step times as they are then, for that share of the promise."""
        self.current = current
        """Frozen, and replaced as a whole: other threads may read it."""
        self._scheduler = scheduler
        self._again = again
        self._revision = scheduler.times.revision
        self._refreshed_us: int | None = None

    @property
    def table(self) -> StepTable | None:
        """The step table as it is now; None where step times come from elsewhere."""
        times = self._scheduler.times
        return times.table if isinstance(times, RefinedTable) else None

    def settled(self, plan: StepPlan, real_us: int, now_us: int) -> None:
        """A step has run."""
        times = self._scheduler.times
        if not isinstance(times, RefinedTable):
            return
        times.observe(len(plan.decodes), plan.prefill_tokens, plan.context_tokens, plan.prior_pairs, real_us)
        if self._refreshed_us is None:
            self._refreshed_us = now_us
        if times.revision != self._revision and now_us - self._refreshed_us >= REFRESH_US:
            self._refreshed_us, self._revision = now_us, times.revision
            self._refresh()

    def _refresh(self) -> None:
        new = self._again(100)
        was, now = self.current.derived.feasible, new.derived.feasible
        if was != now and self._again(LEFT_PERCENT if was else REACHED_PERCENT).derived.feasible is was:
            return
        self.current = new
        self._scheduler.limits = new.limits
