"""Who waits in which order. One policy so far: first come, first served, by first arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sluice_engine.core.request import Request, RequestStatus


class ArrivalQueue:
    """Waiting requests by first arrival, then by order of entry; a preempted request returns to its old place.

    Requests that ended while waiting are skipped when they come up, so that leaving costs nothing.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._order: dict[Request, int] = {}
        self._next = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, in no order."""
        return (request for _, _, incarnation, request in self._heap if _is_current(request, incarnation))

    def push(self, request: Request) -> None:
        """Queue a request by its arrival."""
        order = self._order.setdefault(request, self._next)
        self._next += 1
        heapq.heappush(self._heap, (request.arrival_us, order, request.incarnation, request))
        self._size += 1

    def peek(self) -> Request | None:
        """The next request, without taking it."""
        while self._heap:
            _, _, incarnation, request = self._heap[0]
            if _is_current(request, incarnation):
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take what `peek` showed."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._size -= 1
        return request

    def forget(self, request: Request, *, was_waiting: bool) -> None:
        """A request ended: keep nothing of it."""
        self._order.pop(request, None)
        if was_waiting:
            self._size -= 1
            if len(self._heap) > 64 and len(self._heap) > 2 * self._size:
                self._heap = [entry for entry in self._heap if _is_current(entry[3], entry[2])]
                heapq.heapify(self._heap)


def _is_current(request: Request, incarnation: int) -> bool:
    return request.status is RequestStatus.WAITING and request.incarnation == incarnation
