"""Running requests whose time is up.

What waits is given up by a lower bound, ahead of time (`Waiting.expired`); here nothing is given up before the deadline
itself has passed, since a running request may end with its next token.
"""

from __future__ import annotations

from sluice_engine.core.order.timers import Timers
from sluice_engine.core.request import Request


class Deadlines:
    """The next deadline of each running request that has one."""

    def __init__(self) -> None:
        self._timers = Timers()

    def watch(self, request: Request) -> None:
        """A request runs from now on."""
        due_us = next_deadline_us(request)
        if due_us is not None:
            self._timers.set(request, due_us)

    def forget(self, request: Request) -> None:
        """A request runs no more; nothing when it had no deadline."""
        self._timers.cancel(request)

    def passed(self, now_us: int) -> list[Request]:
        """Requests that missed a deadline, earliest first; the caller ends them. O(log n) for each that comes up."""
        missed: list[Request] = []
        for request in self._timers.due(now_us):
            due_us = next_deadline_us(request)
            if due_us is not None and due_us < now_us:
                missed.append(request)
            elif due_us is not None:
                self._timers.set(request, due_us)  # its first token came in time, so the last one's deadline is next
        return missed


def next_deadline_us(request: Request) -> int | None:
    """The first moment at which waiting any longer for its next token is of no use; None without a deadline."""
    first = None if request.num_output else request.first_token_deadline_us
    due = [deadline for deadline in (first, request.finish_deadline_us) if deadline is not None]
    return min(due) if due else None
