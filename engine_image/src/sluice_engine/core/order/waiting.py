"""The waiting requests, as the scheduler sees them: who goes next, who has run out of time, how much waits.

The policy is a part that is passed in, and so is what a request costs. Expiry works alike under every policy: a heap
by the last moment at which a request can start and still meet its deadlines, which fires while it waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from sluice_engine.core.order.lane import Key
from sluice_engine.core.order.service import Service
from sluice_engine.core.order.timers import Timers
from sluice_engine.core.request import Request


class Order(Protocol):
    """A policy: what comes before what."""

    def push(self, request: Request) -> None:
        """Queue a request, new or preempted."""
        ...

    def remove(self, request: Request) -> None:
        """It entered or ended; called again, also for one that does not wait here."""
        ...

    def candidates(self, now_us: int) -> Iterator[Request]:
        """One pass in order, lazily. What it yielded may be removed meanwhile; it may be left at any point."""
        ...

    def charge(
        self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0, starts: int = 0
    ) -> None:
        """What a request has used since the last charge; only fair shares listen."""
        ...

    def configure(self, key: Key, weights: Mapping[str, int]) -> None:
        """Sort those that wait, and those to come, by another key and other weights of tenants."""
        ...


class Waiting:
    """The set of waiting requests under one order."""

    def __init__(self, order: Order, service: Service) -> None:
        self._order = order
        self._service = service
        self._tokens: dict[Request, int] = {}
        self._expiry = Timers()
        self._next_place = 0
        self.waiting_tokens = 0
        """Known tokens of waiting requests that are still to be computed."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, in no order that means anything."""
        return iter(self._tokens)

    def __contains__(self, request: Request) -> bool:
        return request in self._tokens

    def push(self, request: Request) -> None:
        """Queue a request; a preempted one returns to its place by first arrival."""
        if request.place < 0:
            request.place = self._next_place
            self._next_place += 1
        self._tokens[request] = tokens = request.num_tokens - request.num_computed
        self.waiting_tokens += tokens
        self._order.push(request)
        latest = self._service.latest_start_us(request)
        if latest is not None:
            self._expiry.set(request, latest)

    def remove(self, request: Request) -> None:
        """A request entered the batch, or ended, waiting or not: nothing of it is kept."""
        self.waiting_tokens -= self._tokens.pop(request, 0)
        self._expiry.cancel(request)
        self._order.remove(request)

    def candidates(self, now_us: int) -> Iterator[Request]:
        """One lazy pass in order. The caller removes what enters, and stops when it has looked far enough."""
        return self._order.candidates(now_us)

    def configure(self, key: Key, weights: Mapping[str, int]) -> None:
        """Other numbers of the same policy, or another price of what is left to do: all is sorted again."""
        self._order.configure(key, weights)
        for request in self._tokens:
            latest = self._service.latest_start_us(request)
            if latest is not None:
                self._expiry.set(request, latest)

    def expired(self, now_us: int) -> list[Request]:
        """Requests that cannot meet their deadlines any more, not even started now: the caller ends them.

        Each is named once. O(log n) for each; nothing when there is none.
        """
        expired: list[Request] = []
        for request in self._expiry.due(now_us):
            # The cache may hold more of it than when it came.
            latest = self._service.latest_start_us(request)
            if latest is not None and latest >= now_us:
                self._expiry.set(request, latest)
            else:
                expired.append(request)
        return expired

    def charge(
        self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0, starts: int = 0
    ) -> None:
        """Tell a fair order what a request has used."""
        self._order.charge(request, tokens=tokens, device_us=device_us, block_us=block_us, starts=starts)
