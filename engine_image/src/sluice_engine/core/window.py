"""Steps that were planned and not yet settled: results come back in any order, and are settled in the order of plans.

The window is what makes overlap safe. A result is keyed by its step, and within it by request and incarnation; one for
a step that is not in flight is stale and is dropped. It knows no requests: what a result means is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator

from sluice_engine.core.plan import DrainReason, StepPlan, StepResult


class DrainFirst(Exception):
    """A plan needs something that only settled steps can give."""

    def __init__(self, reason: DrainReason) -> None:
        super().__init__(reason)
        self.reason: DrainReason = reason


class Window:
    """The plans in flight, oldest first."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}
        self._early: dict[int, StepResult] = {}

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._plans)

    def steps(self) -> list[int]:
        """Their numbers, oldest first."""
        return list(self._plans)

    @property
    def newest_step(self) -> int | None:
        """The step that was planned last; None when nothing is in flight."""
        return next(reversed(self._plans), None)

    @property
    def optimistic_blocks(self) -> int:
        """Blocks that steps in flight took on the premise that no request ends meanwhile."""
        return sum(plan.optimistic_blocks for plan in self._plans.values())

    def push(self, plan: StepPlan) -> None:
        """A plan goes to the runner."""
        self._plans[plan.step] = plan

    def take(self, result: StepResult) -> bool:
        """Keep a result until its turn; False when it is stale: nobody waits for that step, or it came twice."""
        if result.step not in self._plans or result.step in self._early:
            return False
        self._early[result.step] = result
        return True

    def due(self) -> Iterator[tuple[StepPlan, StepResult]]:
        """Plans whose results, and those of all before them, have come: each leaves the window as it is named."""
        while self._plans:
            step = next(iter(self._plans))
            result = self._early.pop(step, None)
            if result is None:
                return
            yield self._plans.pop(step), result
