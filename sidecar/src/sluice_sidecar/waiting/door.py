"""The door: the line of those that wait, and the room as each in it finds it.

Owns whose turn it is, what keeps each out, and how long it may wait. Joins what `room`, `classes`, `tenants` and
`sizes` each say of a request; must not know refusals, retries or quotas. Start reading at `Door.look`, then `next_in`.
"""

from __future__ import annotations

import math

from sluice_engine.live_config import LiveConfig
from sluice_sidecar import deadlines
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.capacity.room import Room
from sluice_sidecar.errors import Reason
from sluice_sidecar.waiting.classes import Classes
from sluice_sidecar.waiting.fairness import Queue, Ticket
from sluice_sidecar.waiting.sizes import SizeGuard
from sluice_sidecar.waiting.tenants import Tenants
from sluice_sidecar.waiting.wishes import Wanted

# Room is kept for this much of what tenants with less than their share ask for in their fullest two seconds: what is
# inside goes on growing. And this part of the room at most.
KEPT_PERCENT, MOST_KEPT_PERCENT = 120, 40
# A tenant that has more than its share brings no prefill that makes more than this part of the promise of a first token
# with what is there, and a longer one only where none is: inside the engine the order is that of arrival, and others
# would stand behind all that it brought.
QUEUE_PART = 20
# A few small requests may always stand at the door; beyond, no more than could run at once.
LEAST_DOOR = 4
# Room that is there, and kept for certain others: those go before whoever is held by this.
_KEPT_FOR_OTHERS = frozenset((Reason.SIZE_GUARD, Reason.TENANT_SHARE))


class Door:
    """Those that wait."""

    def __init__(self, live: LiveConfig, room: Room) -> None:
        self._room = room
        self._max_wait_us = live.admission.max_wait_us
        self._queue_us = live.slo.time_to_first_token_us // QUEUE_PART
        self.classes = Classes(live.admission.classes, _moment_us(live))
        self.tenants = Tenants(live.admission.tenants)
        self.sizes = SizeGuard()
        self.queue = Queue(self.tenants, live.scheduling.aging_interval_us)

    def configure(self, live: LiveConfig) -> None:
        """Take other settings; nobody who waits is turned out for them."""
        self._max_wait_us = live.admission.max_wait_us
        self._queue_us = live.slo.time_to_first_token_us // QUEUE_PART
        self.classes.configure(live.admission.classes, _moment_us(live))
        self.tenants.configure(live.admission.tenants)
        self.queue.configure(live.scheduling.aging_interval_us)

    def asked(self, ticket: Ticket, now_us: int) -> None:
        """It has come: room is kept for its tenant and its class."""
        self.classes.asked(ticket.terms.service_class, now_us)
        self.tenants.asked(ticket.terms.tenant, ticket.cost, now_us)

    def found_none(self, look: Look, now_us: int) -> None:
        """One that was looked at found no room, if so."""
        if look.held is not None and not look.held.by_itself:
            self.tenants.was_short(now_us, for_others=look.held.reason is Reason.TENANT_SHARE)

    def look(self, ticket: Ticket, now_us: int) -> Look:
        """The room there is for it, and that it leaves: for other tenants, and for a longer request."""
        service_class, cost = ticket.terms.service_class, ticket.cost
        look = self.classes.look(service_class, cost, self._room, now_us, now_us - ticket.arrived_us)
        if look.held is None:
            look.held = deadlines.held_by_own_promise(look, ticket.terms, now_us - ticket.arrived_us)
        if look.held is not None:
            return look
        wanted = self.tenants.kept_from(ticket.terms.tenant, now_us)
        if wanted is not None and (held := self._beside(ticket, wanted, now_us)) is not None:
            look.held = held
            return look
        if self.tenants.is_crowded(ticket.terms.tenant):
            return look
        kept = self.sizes.kept_for(ticket.terms, cost, now_us)
        if kept is None:
            return look
        both = self.classes.look(service_class, Cost(cost.choices + kept.choices), self._room, now_us, 0)
        if both.held is not None:
            tokens = kept.prompt_tokens + kept.decode_tokens
            problem = f"room is kept for longer requests (about {tokens} tokens) that were refused before"
            look.held = Held(Reason.SIZE_GUARD, problem, both.held.wait_us)
        return look

    def next_in(self, now_us: int) -> tuple[Ticket, Look | None] | None:
        """Who goes from the line now, and the room it found, None for one whose bound has passed; None: nobody.

        One that only its own wishes keep out goes as well: nobody waits behind it.
        """
        for ticket in self.queue.in_turn():
            if ticket.missed(now_us):
                return ticket, None
            look = self.look(ticket, now_us)
            if look.held is None:
                return ticket, look
            ticket.held = look.held
            if look.held.by_itself:
                return ticket, look
            if look.held.reason in _KEPT_FOR_OTHERS:
                return self._next_kept_for(ticket, now_us)
            # Its class is full; a more urgent one that it stands before by its age may not be.
            if look.held.reason is not Reason.CLASS_CEILING:
                return None
        return None

    def blocker(self, ticket: Ticket, now_us: int) -> Ticket | None:
        """Behind whom it has to wait; None when it is its turn."""
        for first in self.queue.in_turn():
            if first is ticket:
                return None
            assert first.held is not None, "who waits was looked at, or stands behind one who was"
            if first.held.reason in _KEPT_FOR_OTHERS and self._is_kept_for(ticket, first, now_us):
                return None
            if first.held.reason is not Reason.CLASS_CEILING:
                return first
        return first

    def one_too_many(self, newcomer: Ticket) -> Ticket | None:
        """Who has to go, since the line is as long as what could run at once; None while it is not."""
        assert self._room.limits is not None, "asked where something was looked at"
        if len(self.queue) <= max(LEAST_DOOR, self._room.limits.max_sequences):
            return None
        return self.queue.superfluous(newcomer)

    def is_cut(self, ticket: Ticket, look: Look, now_us: int) -> bool:
        """Whether its class is full without it: nothing that is about to end would let it in."""
        if look.held is None or look.held.reason is not Reason.CLASS_CEILING:
            return False
        return self.classes.is_cut(ticket.terms.service_class, self._room, now_us)

    def wait_us(self, ticket: Ticket, held: Held, now_us: int) -> int:
        """How long it may wait: `maxWait`, a quarter of what the promise leaves it, and no longer than is of use."""
        if held.by_itself:
            # The promise that it asks for leaves nothing, and those behind it would wait for what is there.
            return 0
        waited_us = now_us - ticket.arrived_us
        most_us = min(self._max_wait_us, (self._room.slack_us(ticket.cost, now_us) - waited_us) // 4)
        if held.wait_us is not None and held.reason is not Reason.TTFT_PROMISE:
            inside = len(self._room.ledger.entries)
            ahead_us = self._room.time_for(self.queue.ahead_of(ticket), inside, now_us) or 0
            # Twice: a mean is no promise, and a wait that may well help is worth more than a quick refusal.
            if held.wait_us + ahead_us > 2 * most_us:
                return 0
        if self.sizes.is_ahead(ticket.terms, ticket.cost, now_us) and not self.tenants.is_crowded(ticket.terms.tenant):
            problem = "longer requests, which are let in less often, go before those that have to wait"
            ticket.held = Held(Reason.SIZE_GUARD, problem, held.wait_us)
            return 0
        bounds_us = [bound for bound in (ticket.terms.bound_us, ticket.terms.door_us) if bound is not None]
        return min([most_us, *(bound - waited_us for bound in bounds_us)])

    def _beside(self, ticket: Ticket, wanted: Wanted, now_us: int) -> Held | None:
        """What keeps it out beside what others with less than their share are about to ask for."""
        limits, room, cost = self._room.limits, self._room, ticket.cost
        assert limits is not None, "asked where something was looked at"
        most_us = max(0, self._queue_us - limits.computing_us(cost.prefill_tokens))
        if room.inside(now_us) and (queue_us := room.queue_us(limits, cost, now_us)) > most_us:
            return Held(Reason.TENANT_SHARE, self.over_share(ticket), queue_us - most_us)
        part = max(wanted.tokens / limits.pool_tokens, wanted.requests / limits.max_sequences)
        less_percent = min(MOST_KEPT_PERCENT, math.ceil(KEPT_PERCENT * part))
        held = self.classes.look(ticket.terms.service_class, cost, room, now_us, 0, less_percent=less_percent).held
        return None if held is None else Held(Reason.TENANT_SHARE, self.over_share(ticket), held.wait_us)

    def over_share(self, ticket: Ticket) -> str:
        """What is said to one whose tenant has more than its share."""
        has, due = self.tenants.shares_percent(ticket.terms.tenant)
        return f"this tenant has {has} % of what runs, its share is {due} %, and others ask for theirs"

    def _next_kept_for(self, blocker: Ticket, now_us: int) -> tuple[Ticket, Look | None] | None:
        """The first in the line for whom the one whose turn it is must leave room, if it fits."""
        for ticket in self.queue:
            if self._is_kept_for(ticket, blocker, now_us):
                look = self.look(ticket, now_us)
                return None if look.held is not None else (ticket, look)
        return None

    def _is_kept_for(self, ticket: Ticket, blocker: Ticket, now_us: int) -> bool:
        if ticket.terms.service_class != blocker.terms.service_class:
            return False
        if blocker.held is not None and blocker.held.reason is Reason.TENANT_SHARE:
            return self.tenants.kept_from(ticket.terms.tenant, now_us) is None
        kept = self.sizes.kept_for(blocker.terms, blocker.cost, now_us)
        return kept is not None and self.sizes.is_as_large(ticket.cost, kept)


def _moment_us(live: LiveConfig) -> int:
    """How long one whose turn it is may wait."""
    return min(live.admission.max_wait_us, live.slo.time_to_first_token_us // 4)
