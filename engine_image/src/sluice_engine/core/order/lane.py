"""Requests by a key that does not change while they wait: a heap with lazy removal, whose passes take nothing out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from sluice_engine.core.request import Request

Key = Callable[[Request], int]
"""What the least of goes first. It is asked once, at the push: a key that moved with time would break the heap."""

# key, first arrival, place, ticket: unique, so that two requests are never compared.
_Entry = tuple[int, int, int, int, Request]

# Below this many stale entries, sweeping them out is not worth a pass.
_STALE_KEPT = 64


class Lane:
    """Waiting requests by key; by first arrival, then by order of entry, among equals."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._heap: list[_Entry] = []
        self._tickets: dict[Request, int] = {}
        self._next = 0
        self._aside: list[_Entry] = []
        """What the last pass has yielded; what of it still waits returns before the next one."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: Request) -> bool:
        return request in self._tickets

    def push(self, request: Request) -> None:
        """Queue a request by its key as it is now."""
        assert request not in self._tickets, f"{request.id} waits already"
        self._next += 1
        self._tickets[request] = self._next
        entry = (self._key(request), request.arrival_us, request.place, self._next, request)
        heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; nothing when it does not wait here."""
        if self._tickets.pop(request, None) is not None and len(self._heap) > 2 * len(self._tickets) + _STALE_KEPT:
            self._heap = [entry for entry in self._heap if self._waits(entry)]
            heapq.heapify(self._heap)

    def keyed(self, key: Key) -> Lane:
        """A lane of the same requests, by another key."""
        lane = Lane(key)
        for request in self._tickets:
            lane.push(request)
        return lane

    def in_order(self) -> Iterator[Request]:
        """One pass over the waiting requests, least key first. It may be left at any point; a new one starts anew.

        What it yielded may be removed meanwhile. O(log n) for each request that it yields, nothing for the rest.
        """
        for entry in self._aside:
            if self._waits(entry):
                heapq.heappush(self._heap, entry)
        aside: list[_Entry] = []
        self._aside = aside
        while self._heap and self._aside is aside:
            entry = heapq.heappop(self._heap)
            if self._waits(entry):
                aside.append(entry)
                yield entry[4]

    def _waits(self, entry: _Entry) -> bool:
        return self._tickets.get(entry[4]) == entry[3]
