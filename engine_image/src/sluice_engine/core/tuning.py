"""Keeps an engine's limits true while its step times are learned, and while its promise changes.

Owns the current derivation. Steps are told to it as they settle; every few hundred of them the limits are derived again
and the scheduler obeys them from its next step on. It counts steps, not time, so that the same steps give the same
limits wherever they are run again. Feasibility has a margin either way: a promise at the edge does not come and go.
Another `live.json` is obeyed likewise: from the next step on, by the requests that run and those that wait.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice_engine.core.derivation import Derivation
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.refine import RefinedTable
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import StepTable
from sluice_engine.live_config import LiveConfig

# Each revision of the table is 64 steps: seconds on a CPU, and a fraction of their cost.
REFRESH_REVISIONS = 4
# A promise that was feasible stays so while it would be with a tenth more time, and one that was not becomes so once it
# would be with a twentieth less.
LEFT_PERCENT, REACHED_PERCENT = 110, 95


class Tuning:
    """What an engine says of itself, as of now."""

    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveConfig,
        current: Derivation,
        again: Callable[[LiveConfig, int], Derivation],
    ) -> None:
        """`again(live, percent)`: derive by the step times as they are then, for that share of the promise."""
        self.live = live
        """What is obeyed. Frozen, and replaced as a whole: other threads may read it."""
        self.current = current
        """What follows from it; likewise."""
        self._scheduler = scheduler
        self._again = again
        self._revision = scheduler.times.revision

    @property
    def table(self) -> StepTable | None:
        """The step table as it is now; None where step times come from elsewhere."""
        times = self._scheduler.times
        return times.table if isinstance(times, RefinedTable) else None

    @property
    def tail_ratio(self) -> float:
        """Step time at the promise's `step_quantile` over the median; 1 where step times are bounds themselves."""
        return self.table.tail_ratio if self.table is not None else 1.0

    @property
    def learned_steps_total(self) -> int:
        """Steps that the table has learned from."""
        times = self._scheduler.times
        return times.learned_steps_total if isinstance(times, RefinedTable) else 0

    def configure(self, live: LiveConfig) -> None:
        """Obey another `live.json` from the next step on; only between two steps, by the thread that owns them."""
        times = self._scheduler.times
        if isinstance(times, RefinedTable):
            times.aim(live.slo.target_percent, live.slo.inter_token_latency_us)
            self._revision = times.revision
        current = self._again(live, 100)
        self._scheduler.configure(current.limits, self._scheduler.policies.under(live))
        self.live, self.current = live, current

    def settled(self, plan: StepPlan, real_us: int) -> None:
        """A step has run."""
        times = self._scheduler.times
        if not isinstance(times, RefinedTable) or plan.swap_out or plan.swap_in or plan.draft_tokens:
            return  # copies to and from the host are no cost of the batch; drafts have a price of their own
        times.observe(len(plan.decodes), plan.prefill_tokens, plan.context_tokens, plan.prior_pairs, real_us)
        if times.revision - self._revision >= REFRESH_REVISIONS:
            self._revision = times.revision
            self._refresh()

    def _refresh(self) -> None:
        new = self._again(self.live, 100)
        was, now = self.current.derived.feasible, new.derived.feasible
        margin = LEFT_PERCENT if was else REACHED_PERCENT
        if was != now and self._again(self.live, margin).derived.feasible is was:
            return
        self.current = new
        self._scheduler.limits = new.limits
