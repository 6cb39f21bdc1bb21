"""Steps computed in a thread of their own, so that the next is planned while one runs.

One thread, so steps are computed in the order in which they were planned: that is what lets a decode begin with a token
that only the device knows yet. Torch lets go of the interpreter while it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from sluice_engine.core.loop import Runner
from sluice_engine.core.plan import StepPlan, StepResult


@runtime_checkable
class Launcher(Protocol):
    """A runner whose device computes by itself: a step may be queued behind one that is not done."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a step that is not empty; the call waits for its result."""
        ...


class ThreadExecutor:
    """A runner's steps, in turn, elsewhere. `submit` and `collect` belong to the thread that owns the loop."""

    def __init__(self, runner: Runner) -> None:
        self._launch = runner.launch if isinstance(runner, Launcher) else _at_once(runner)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._results: deque[Future[Callable[[], StepResult]]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Hand a step over."""
        self._results.append(self._thread.submit(self._launch, plan))

    def collect(self) -> StepResult:
        """The oldest step's result, once it is there; whatever the runner raised is raised here."""
        return self._results.popleft().result()()

    def close(self) -> None:
        """Let the step in flight end, drop those behind it, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _at_once(runner: Runner) -> Callable[[StepPlan], Callable[[], StepResult]]:
    def launch(plan: StepPlan) -> Callable[[], StepResult]:
        result = runner.execute(plan)
        return lambda: result

    return launch
