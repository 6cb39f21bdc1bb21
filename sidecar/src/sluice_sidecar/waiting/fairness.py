"""The queue at the door: who asked, and in which order those that wait are looked at.

Class first, with aging: the key is `base priority × aging interval + arrival`, constant in time, so a class that waits
moves ahead of fresh work of a more urgent one. Inside a class the tenant that has had least of the engine for its
weight, and of its requests the oldest. Nobody is overtaken by who comes later in that order. Must not know rooms or
answers.
Start reading at `Queue.in_turn`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from sluice_engine.core.terms import CLASSES, Terms
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.capacity.look import Held
from sluice_sidecar.errors import Refusal
from sluice_sidecar.retries.attempts import FIRST, Attempt
from sluice_sidecar.telemetry.decisions import Decision
from sluice_sidecar.waiting.tenants import Tenants


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that asks. One that waits is settled once: with a permit, or with the refusal of what held it."""

    request_id: str
    cost: Cost
    terms: Terms
    arrived_us: int
    """When its body was whole: the promise of a first token runs from there."""
    decision: Decision
    on_settled: Callable[[Permit | Refusal], None]
    attempt: Attempt = FIRST
    """Its number as counted, whatever the headers say."""
    deadline_us: int = 0
    """When its wait is over."""
    held: Held | None = None
    """What kept it out when it was last looked at; None while it only stands behind others."""
    verdict: Permit | Refusal | None = None

    def missed(self, now_us: int) -> bool:
        """Whether its caller has no more use for it."""
        bound_us = self.terms.bound_us
        return bound_us is not None and now_us >= self.arrived_us + bound_us


class _Band:
    """Those that wait with one base priority: a lane for each tenant."""

    def __init__(self, priority: int, tenants: Tenants) -> None:
        self.priority = priority
        self.tickets: OrderedDict[str, Ticket] = OrderedDict()
        self.lanes: dict[str, OrderedDict[str, Ticket]] = {}
        self._tenants = tenants
        self._heap: list[tuple[int, int, str]] = []
        """Virtual service, place, tenant. An entry that is too low is moved up when it is met."""
        self._places = 0
        self._place: dict[str, int] = {}
        """The place of each tenant's own entry: all others are left from before."""

    @property
    def oldest(self) -> Ticket:
        """Who has waited longest."""
        return next(iter(self.tickets.values()))

    def push(self, ticket: Ticket) -> None:
        tenant = ticket.terms.tenant
        self.tickets[ticket.request_id] = ticket
        lane = self.lanes.get(tenant)
        if lane is None:
            lane = self.lanes[tenant] = OrderedDict()
        lane[ticket.request_id] = ticket
        self._tenants.waits(tenant)
        if len(lane) == 1:
            self.renew(tenant)

    def remove(self, ticket: Ticket) -> None:
        tenant = ticket.terms.tenant
        del self.tickets[ticket.request_id]
        lane = self.lanes[tenant]
        del lane[ticket.request_id]
        if not lane:
            del self.lanes[tenant], self._place[tenant]
        self._tenants.waits_no_more(tenant)

    def renew(self, tenant: str) -> None:
        """The tenant's place may have come forward."""
        if tenant not in self.lanes:
            return
        self._places += 1
        self._place[tenant] = self._places
        heappush(self._heap, (self._tenants.virtual(tenant), self._places, tenant))
        if len(self._heap) > 2 * len(self.lanes) + 64:
            self._heap = [(self._tenants.virtual(name), place, name) for name, place in self._place.items()]
            heapify(self._heap)

    def due(self) -> Ticket:
        """The next of the tenant that has had least."""
        while True:
            virtual, place, tenant = self._heap[0]
            if self._place.get(tenant) != place:
                heappop(self._heap)
            elif virtual < (now := self._tenants.virtual(tenant)):
                heapreplace(self._heap, (now, place, tenant))
            else:
                return next(iter(self.lanes[tenant].values()))


class Queue:
    """All that wait at the door."""

    def __init__(self, tenants: Tenants, aging_interval_us: int) -> None:
        self._tenants = tenants
        self._aging_interval_us = aging_interval_us
        self._bands = [_Band(priority, tenants) for priority in range(2 * len(CLASSES))]
        self._count = 0

    def configure(self, aging_interval_us: int) -> None:
        """Take another aging interval; 0 turns aging off."""
        self._aging_interval_us = aging_interval_us
        self.renew_all()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        """Most urgent first, then by arrival."""
        for band in self._bands:
            yield from band.tickets.values()

    def push(self, ticket: Ticket) -> None:
        """It waits from now on."""
        self._bands[ticket.terms.priority()].push(ticket)
        self._count += 1

    def remove(self, ticket: Ticket) -> bool:
        """It waits no more; False when it did not."""
        band = self._bands[ticket.terms.priority()]
        if ticket.request_id not in band.tickets:
            return False
        band.remove(ticket)
        self._count -= 1
        return True

    def renew(self, tenant: str) -> None:
        """A tenant was given something back: its place may have come forward."""
        for band in self._bands:
            band.renew(tenant)

    def renew_all(self) -> None:
        """Weights have changed."""
        for band in self._bands:
            for tenant in list(band.lanes):
                band.renew(tenant)

    def in_turn(self) -> Iterator[Ticket]:
        """Who is looked at next, and who after that where it is held by its own class alone: one for each class."""
        bands = [band for band in self._bands if band.tickets]
        if not bands:
            return
        first, interval_us = bands[0], self._aging_interval_us
        if len(bands) > 1 and interval_us:
            key = first.priority * interval_us + first.oldest.arrived_us
            aged = [(band.priority * interval_us + band.oldest.arrived_us, band.oldest) for band in bands[1:]]
            # What has aged goes by its age alone: a fresh request of its class has not waited so long.
            yield from (ticket for ahead, ticket in sorted(aged, key=_first) if ahead < key)
        yield first.due()

    def ahead_of(self, ticket: Ticket) -> int:
        """How many go in before it, by the order as it is now: each tenant takes turns by its weight."""
        own = ticket.terms
        ahead = sum(len(band.tickets) for band in self._bands[: own.priority()])
        lanes = self._bands[own.priority()].lanes
        turns, weight = len(lanes.get(own.tenant, ())), self._tenants.weight(own.tenant)
        for tenant, lane in lanes.items():
            if tenant != own.tenant:
                ahead += min(len(lane), -(-turns * self._tenants.weight(tenant) // weight))
        return ahead + max(0, turns - 1)

    def superfluous(self, newcomer: Ticket) -> Ticket:
        """Who goes when one too many waits: of the least urgent, the newest of the tenant with most for its weight.

        The newcomer among equals, and never one that is more urgent or whose tenant has fewer.
        """
        band = next(band for band in reversed(self._bands) if band.tickets)
        weight = self._tenants.weight

        def excess(tenant: str) -> tuple[float, bool]:
            return len(band.lanes[tenant]) / weight(tenant), tenant == newcomer.terms.tenant

        lane = band.lanes[max(band.lanes, key=excess)]
        return next(reversed(lane.values()))

    def others_wait(self, ticket: Ticket) -> bool:
        """Whether another tenant waits with the same urgency."""
        lanes = self._bands[ticket.terms.priority()].lanes
        return len(lanes) > (ticket.terms.tenant in lanes)


def _first(pair: tuple[int, Ticket]) -> int:
    return pair[0]
