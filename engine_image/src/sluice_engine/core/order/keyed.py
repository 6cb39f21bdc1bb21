"""Orders by one number per request, constant while it waits; and the age guard for those that alone would starve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sluice_engine.core.order.lane import Key, Lane
from sluice_engine.core.order.service import Service
from sluice_engine.core.request import Request

# Long against any promise of a first token, short against a user's patience: who has waited so long goes by arrival.
AGE_GUARD_US = 60_000_000

# Behind every deadline that a clock of microseconds can show.
_NO_DEADLINE_US = 1 << 62


class KeyedOrder:
    """Least key first; with a guard, those that have waited that long go before, by arrival.

    The bound: with a guard, no request is overtaken by one that arrived more than `guard_us` after it.
    """

    def __init__(self, key: Key, *, guard_us: int | None = None) -> None:
        self._by_key = Lane(key)
        self._by_arrival = None if guard_us is None else Lane(first_come)
        self._guard_us = guard_us or 0

    def push(self, request: Request) -> None:
        """Queue a request."""
        self._by_key.push(request)
        if self._by_arrival is not None:
            self._by_arrival.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out; nothing when it does not wait."""
        self._by_key.remove(request)
        if self._by_arrival is not None:
            self._by_arrival.remove(request)

    def candidates(self, now_us: int) -> Iterator[Request]:
        """One pass in order."""
        if self._by_arrival is None:
            yield from self._by_key.in_order()
            return
        overdue: set[Request] = set()
        for request in self._by_arrival.in_order():
            if request.arrival_us + self._guard_us > now_us:
                break
            overdue.add(request)
            yield request
        yield from (request for request in self._by_key.in_order() if request not in overdue)

    def charge(
        self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0, starts: int = 0
    ) -> None:
        """Nothing: no key depends on what was used."""

    def configure(self, key: Key, weights: Mapping[str, int]) -> None:
        """Sort by another key."""
        del weights
        self._by_key = self._by_key.keyed(key)


def first_come(request: Request) -> int:
    """First come, first served: nobody is ever overtaken."""
    return request.arrival_us


def shortest_job(service: Service) -> Key:
    """Shortest job first, by what is left to compute. It starves long requests, so it wants a guard."""
    return service.work_us


def earliest_deadline(service: Service) -> Key:
    """The one that must start first goes first; those without a deadline come after, by arrival.

    A time to first token and a time to the end are no two numbers to take a minimum of; the last moment to start is
    what both have in common. A request whose moment has passed has left the order (`Waiting.expired`): nothing is
    clamped to "most urgent".
    """

    def key(request: Request) -> int:
        latest = service.latest_start_us(request)
        return _NO_DEADLINE_US if latest is None else latest

    return key


def priority(aging_interval_us: int) -> Key:
    """Lower priority number first; each `aging_interval_us` of waiting counts as one level.

    At any time now, `priority − (now − arrival) / interval` sorts as `priority × interval + arrival` does, so the key
    needs no clock and no rounding. The bound: a request is overtaken only by those that arrive within
    (its priority − theirs) × interval after it. 0 turns aging off, and the bound with it.
    """
    if aging_interval_us == 0:
        return lambda request: request.priority
    return lambda request: request.priority * aging_interval_us + request.arrival_us
