"""Weighted fair shares of tenants, in a unit that has a name: start-time fair queueing.

Each tenant has an account of virtual service: what it used, divided by its weight. The tenant with the least goes next.
A request is booked at its estimate when it starts, so that one step cannot fill the batch with one tenant; what it
really uses draws the booking down, and what is left of it is given back when it leaves. A tenant that comes back from
idleness starts at the virtual time of the last start: it has saved up nothing, and owes what it had overdrawn.

The bound, for two tenants f and m that both wait all the time: what they have started, each divided by its weight,
differs by at most one request of f over f's weight plus one request of m over m's weight.
Source: Goyal, Vin, Cheng: Start-time Fair Queueing, 1996; Sheng et al.: Fairness in Serving LLMs, OSDI 2024.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from sluice_engine.config import FairnessUnit
from sluice_engine.core.order.lane import Key, Lane
from sluice_engine.core.order.service import output_left
from sluice_engine.core.request import Request

# Virtual service is kept in such fractions of a unit, and the division's remainder is carried on: no rounding adds up.
_SCALE = 1_000_000

# Accounts of idle tenants that are kept for what they have overdrawn. Names come from outside, so they are bounded.
MAX_IDLE_TENANTS = 1024

# Tokens of history behind the learned price of a token; older ones fade.
_PRICE_MEMORY_TOKENS = 1 << 20


@dataclass(slots=True)
class _Booking:
    """A running request's estimate, and what it has really used."""

    tokens: int
    """Tokens it was expected to need: what the price is learned by."""
    left: int
    """Of the estimate, in the unit; what is used beyond it is charged as it comes."""
    used: int = 0


class _Account:
    """One tenant: its waiting requests and its virtual service."""

    def __init__(self, name: str, weight: int, key: Key) -> None:
        self.name = name
        self.weight = weight
        self.lane = Lane(key)
        self.virtual = 0
        self.num_booked = 0
        """Its requests that run."""
        self._remainder = 0

    def add(self, amount: int) -> None:
        """Charge, or give back, an amount of the unit."""
        more, self._remainder = divmod(amount * _SCALE + self._remainder, self.weight)
        self.virtual += more

    def scaled(self, amount: int) -> int:
        """What an amount is in virtual service."""
        return amount * _SCALE // self.weight

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing here."""
        return not len(self.lane) and not self.num_booked


class WeightedFair:
    """Tenants by virtual service; inside a tenant by a key, first come unless told otherwise."""

    def __init__(self, unit: FairnessUnit, key: Key, weights: Mapping[str, int] | None = None) -> None:
        """`weights`: positive integers; a tenant that is not named has 1."""
        self._unit = unit
        self._which = get_args(FairnessUnit).index(unit)
        """Of starts, tokens, device time and KV over time, in the order of their names."""
        self._key = key
        self._weights = dict(weights or {})
        self._accounts: dict[str, _Account] = {}
        self._heap: list[tuple[int, str]] = []
        """Virtual service and name; an entry that is too low for its account is moved when it comes up."""
        self._aside: list[str] = []
        """Tenants that the last pass took off the heap."""
        self._idle: dict[str, None] = {}
        """Tenants with nothing here that are kept for what they have overdrawn, the longest kept first."""
        self._virtual_time = 0
        """Virtual service at which the last request started: it never falls."""
        self._bookings: dict[Request, _Booking] = {}
        # The learned price: units used by requests that ended, over the tokens that were expected of them.
        self._used, self._expected = (1, 1) if unit == "Tokens" else (0, 1)

    def push(self, request: Request) -> None:
        """Queue a request of its tenant."""
        self._settle(request)
        account = self._account(request.tenant)
        self._idle.pop(request.tenant, None)
        if not len(account.lane):
            account.virtual = max(account.virtual, self._virtual_time)
            self._enqueue(account)
        account.lane.push(request)

    def remove(self, request: Request) -> None:
        """It entered, or it ended: then its booking is settled."""
        account = self._accounts.get(request.tenant)
        if account is None:
            return
        if request in account.lane:
            account.lane.remove(request)
        else:
            self._settle(request)
        if account.is_idle:
            self._forget_idle(account)

    def candidates(self, now_us: int) -> Iterator[Request]:
        """One pass: the next request of the tenant with the least virtual service, each counted as if it entered."""
        del now_us
        for name in self._aside:
            if (account := self._accounts.get(name)) is not None and len(account.lane):
                self._enqueue(account)
        aside: list[str] = []
        self._aside = aside
        met: set[str] = set()
        opened: list[tuple[int, str, Iterator[Request]]] = []
        """Tenants met in this pass, by virtual service after what the pass has given them."""
        while self._aside is aside:
            account = self._least(met)
            if account is not None and (not opened or (account.virtual, account.name) < opened[0][:2]):
                heapq.heappop(self._heap)
                met.add(account.name)
                aside.append(account.name)
                heapq.heappush(opened, (account.virtual, account.name, account.lane.in_order()))
            if not opened:
                return
            virtual, name, lane = heapq.heappop(opened)
            request = next(lane, None)
            if request is not None:
                after = virtual + self._accounts[name].scaled(self._estimate(request))
                heapq.heappush(opened, (after, name, lane))
                yield request

    def charge(
        self, request: Request, *, tokens: int = 0, device_us: int = 0, block_us: int = 0, starts: int = 0
    ) -> None:
        """Book a request that starts (`starts`); draw down what runs. Late and lumped charges come out the same."""
        account = self._account(request.tenant)
        if starts:
            self._virtual_time = max(self._virtual_time, account.virtual)
            estimate = self._estimate(request)
            account.add(estimate)
            if self._unit != "Starts":
                self._bookings[request] = _Booking(_tokens_left(request), estimate)
                account.num_booked += 1
        used = (0, tokens, device_us, block_us)[self._which]
        if used:
            booking = self._bookings.get(request)
            covered = 0
            if booking is not None:
                booking.used += used
                covered = min(used, booking.left)
                booking.left -= covered
            account.add(used - covered)

    def configure(self, key: Key, weights: Mapping[str, int]) -> None:
        """Other weights from now on: what was used stays used, what is booked is booked at the new ones."""
        self._key, self._weights = key, dict(weights)
        outstanding: dict[str, int] = {}
        for request, booking in self._bookings.items():
            outstanding[request.tenant] = outstanding.get(request.tenant, 0) + booking.left
        for account in self._accounts.values():
            account.lane = account.lane.keyed(key)
            booked, weight = outstanding.get(account.name, 0), self._weights.get(account.name, 1)
            if weight != account.weight:
                account.add(-booked)
                account.weight = weight
                account.add(booked)
            if len(account.lane):
                self._enqueue(account)

    def service(self, tenant: str) -> int:
        """Virtual service of a tenant in millionths of the unit over its weight: for tests and for people."""
        account = self._accounts.get(tenant)
        return self._virtual_time if account is None else account.virtual

    def _estimate(self, request: Request) -> int:
        if self._unit == "Starts":
            return 1
        return _tokens_left(request) * self._used // self._expected

    def _settle(self, request: Request) -> None:
        """Give back what a request was booked for and did not use, and learn from it."""
        booking = self._bookings.pop(request, None)
        if booking is None:
            return
        account = self._accounts[request.tenant]
        account.num_booked -= 1
        account.add(-booking.left)
        if len(account.lane):
            self._enqueue(account)
        self._used += booking.used
        self._expected += booking.tokens
        if self._expected > _PRICE_MEMORY_TOKENS:
            self._used, self._expected = self._used // 2, max(1, self._expected // 2)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant, self._weights.get(tenant, 1), self._key)
            account.virtual = self._virtual_time
        return account

    def _enqueue(self, account: _Account) -> None:
        heapq.heappush(self._heap, (account.virtual, account.name))
        if len(self._heap) > 2 * len(self._accounts) + 64:
            self._heap = [(each.virtual, each.name) for each in self._accounts.values() if len(each.lane)]
            heapq.heapify(self._heap)

    def _least(self, met: set[str]) -> _Account | None:
        """The waiting tenant with the least virtual service that this pass has not met; it stays on top of the heap."""
        while self._heap:
            virtual, name = self._heap[0]
            account = self._accounts.get(name)
            if account is None or not len(account.lane) or name in met or virtual > account.virtual:
                heapq.heappop(self._heap)  # gone, set aside, or entered again further up
            elif virtual < account.virtual:
                heapq.heapreplace(self._heap, (account.virtual, name))
            else:
                return account
        return None

    def _forget_idle(self, account: _Account) -> None:
        """Keep of an idle tenant what it has overdrawn, and only so many such."""
        if account.virtual <= self._virtual_time:
            del self._accounts[account.name]
            self._idle.pop(account.name, None)
            return
        self._idle[account.name] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            # Half of them, those that owe least: a sweep is then paid by the tenants that came since the last one.
            by_debt = sorted(self._idle, key=lambda name: self._accounts[name].virtual)
            for name in by_debt[: len(by_debt) // 2]:
                del self._accounts[name], self._idle[name]


def _tokens_left(request: Request) -> int:
    return request.num_tokens - request.num_computed + output_left(request) - 1
