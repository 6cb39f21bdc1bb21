"""Steps computed in a thread of their own, so that the next is planned while one runs.

One thread, so steps are computed in the order in which they were planned: that is what lets a decode begin with a token
that only the device knows yet. Torch lets go of the interpreter while it computes.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from sluice_engine.core.loop import Runner
from sluice_engine.core.plan import StepPlan, StepResult


class ThreadExecutor:
    """A runner's steps, in turn, elsewhere. `submit` and `collect` belong to the thread that owns the loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._results: deque[Future[StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Hand a step over."""
        self._results.append(self._thread.submit(self._runner.execute, plan))

    def collect(self) -> StepResult:
        """The oldest step's result, once it is there; whatever the runner raised is raised here."""
        return self._results.popleft().result()

    def close(self) -> None:
        """Let the step in flight end, drop those behind it, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
