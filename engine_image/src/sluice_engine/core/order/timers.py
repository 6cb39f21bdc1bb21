"""Requests by the time at which something about them is due: one time each, and cancelled ones are passed over."""

from __future__ import annotations

import heapq

from sluice_engine.core.request import Request

# Below this many stale entries, sweeping them out is not worth a pass.
_STALE_KEPT = 64


class Timers:
    """A heap of deadlines, independent of any order and of any capacity: it fires while a request waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._tickets: dict[Request, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def set(self, request: Request, at_us: int) -> None:
        """Make the request due once `at_us` has passed, and at no earlier or later time set before."""
        self._next += 1
        self._tickets[request] = self._next
        heapq.heappush(self._heap, (at_us, self._next, request))

    def cancel(self, request: Request) -> None:
        """Forget the request; nothing when it has no time."""
        if self._tickets.pop(request, None) is not None and len(self._heap) > 2 * len(self._tickets) + _STALE_KEPT:
            # Requests hold their tokens: what has ended must not be kept until a deadline far away.
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def due(self, now_us: int) -> list[Request]:
        """Requests whose time lies before now, earliest first; each is named once, and has no time afterwards."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] < now_us:
            _, ticket, request = heapq.heappop(self._heap)
            if self._tickets.get(request) == ticket:
                del self._tickets[request]
                due.append(request)
        return due
