"""The decision: who is let in now, who waits a moment at the door, and who is told when to come back.

Owns the order of the tests. Whether there is room is `room`'s to say, whose turn it is and what keeps each out
`door`'s, who comes back and when `returning`'s. One call decides and reserves, so nothing can slip in between. Pure:
the clock comes in with each call, randomness as an argument; a simulator runs this very class.
Start reading at `Admission.enter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import STANDARD, Terms
from sluice_engine.errors import sentence
from sluice_engine.live_config import Enforcement, LiveConfig
from sluice_sidecar import deadlines, refusals
from sluice_sidecar.callers.quotas import Quotas
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Entry, Permit
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.capacity.room import Room
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimates.work import Work, work_of
from sluice_sidecar.refusals import MISSED
from sluice_sidecar.retries.attempts import FIRST, Attempt
from sluice_sidecar.retries.retry_budget import SPENT
from sluice_sidecar.retries.returning import Returning
from sluice_sidecar.telemetry.decisions import Decisions
from sluice_sidecar.telemetry.demand import Demand
from sluice_sidecar.waiting.door import Door
from sluice_sidecar.waiting.fairness import Ticket
from sluice_sidecar.waiting.tenants import expected_us, used_tokens, used_us

__all__ = ["Admission", "Ticket"]

# What `open` in the gate's state asks for.
PROBE_COST = Cost((ChoiceCost(prompt_tokens=64, max_tokens=64),))

_NO_TERMS = Terms()


class Admission:
    """Who is let in."""

    def __init__(
        self, live: LiveConfig, *, stale_after_us: int, blind_after_us: int, draw: Callable[[int, int], int]
    ) -> None:
        """`draw(lo, hi)` is a random whole number between both, evenly."""
        self.room = Room(live, stale_after_us=stale_after_us, blind_after_us=blind_after_us)
        self.room.ledger.on_release = self._released
        self._door = Door(live, self.room)
        self.classes, self.tenants, self.sizes = self._door.classes, self._door.tenants, self._door.sizes
        self.quotas = Quotas(live.admission.tenants)
        self.returning = Returning(live.admission.retry_budget_percent, self._time_for, draw)
        self.mode: Enforcement = live.admission.mode
        self.unavailable: Reason | None = Reason.ENGINE_LOADING
        self.admitted_total = 0
        self.refused_total: Counter[str] = Counter()
        self.decisions = Decisions()
        self.demand = Demand()
        self._queue = self._door.queue

    def configure(self, live: LiveConfig, now_us: int) -> None:
        """Take other settings; nobody who is inside or waits is turned out for them."""
        self.mode = live.admission.mode
        self.room.configure(live)
        self.returning.budget.configure(live.admission.retry_budget_percent)
        self._door.configure(live)
        self.quotas.configure(live.admission.tenants, now_us)
        self.advance(now_us)
        # Where nothing is refused for load, nobody who waits is refused for it when his time is over.
        for ticket in list(self._queue) if self.mode == "Observe" else ():
            self._queue.remove(ticket)
            self._settle(ticket, self._admit_waiting(ticket, self._door.look(ticket, now_us), now_us))

    # What the engine tells.

    def observe(self, state: EngineState, as_of_us: int, now_us: int) -> None:
        """Take in the engine's state, true as of `as_of_us`, and let in who fits now."""
        self.room.observe(state, as_of_us, now_us)
        self.room.ledger.expire(now_us)
        self.advance(now_us)

    def set_unavailable(self, reason: Reason | None, now_us: int) -> None:
        """No capacity exists, for this reason; None: it does."""
        if reason is Reason.ENGINE_DEAD and self.unavailable is not reason:
            self.room.ledger.forget_engine()
        self.unavailable = reason
        self.room.ledger.expire(now_us)
        self.advance(now_us)

    # What a request asks.

    def enter(
        self,
        request_id: str,
        cost: Cost,
        now_us: int,
        on_settled: Callable[[Permit | Refusal], None],
        *,
        terms: Terms = _NO_TERMS,
        attempt: Attempt = FIRST,
        waited_us: int = 0,
    ) -> Permit | Refusal | Ticket:
        """Decide and reserve in one go. A `Ticket` waits in order; `on_settled` is called once, later.

        `waited_us` went by since its body was whole, and is gone from the promise.
        """
        decision = self.decisions.priced(request_id, cost, now_us - waited_us, terms)
        attempt = self.returning.counted(attempt, now_us)
        decision.attempt = attempt.number
        ticket = Ticket(request_id, cost, terms, now_us - waited_us, decision, on_settled, attempt)
        if (refusal := self._hopeless(ticket, now_us)) is not None:
            return refusal
        refusal = self._shed_early(ticket, now_us)
        if self.mode == "Observe":
            decision.shed_by, look = self._shed_by(ticket, refusal, now_us)
            return self._admit(ticket, look, now_us)
        if refusal is not None:
            self.returning.refused(attempt, now_us)
            return refusal
        verdict = self._ask(ticket, now_us)
        if isinstance(verdict, Refusal):
            self.quotas.settle(request_id, 0)
        return verdict

    def expire(self, ticket: Ticket, now_us: int) -> None:
        """Its time at the door is over: it is told what held it."""
        if self._queue.remove(ticket):
            # A timer may be a little early: its time is over all the same.
            over_us = max(now_us, ticket.deadline_us)
            self._settle(ticket, MISSED if ticket.missed(over_us) else self._turn_away(ticket, now_us))
            self.advance(now_us)

    def leave(self, ticket: Ticket, now_us: int) -> None:
        """Its client left, at the door or with a permit it never heard of."""
        if self._queue.remove(ticket):
            self.quotas.settle(ticket.request_id, 0)
            # It was not refused; whoever gave up may ask again all the same.
            self.returning.may_return(ticket.attempt, now_us)
            self.advance(now_us)
        elif isinstance(ticket.verdict, Permit):
            ticket.verdict.close(now_us)

    def advance(self, now_us: int) -> None:
        """Let in those whose turn it is and who fit now."""
        while (found := self._next(now_us)) is not None:
            ticket, verdict = found
            self._queue.remove(ticket)
            self._settle(ticket, verdict)

    # What was answered, and would be.

    def refuse_unavailable(self) -> Refusal | None:
        """The refusal while no capacity exists; None while it does."""
        return None if self.unavailable is None else refusals.unavailable(self.unavailable)

    def refuse_busy(self, reason: Reason, problem: str, now_us: int, service_class: str = STANDARD) -> Refusal:
        """The refusal for load that was found outside the tests here."""
        return self.returning.busy(Held(reason, problem, self._time_for(1, now_us)), service_class, now_us)

    def overflowed(self, terms: Terms, attempt: Attempt, now_us: int) -> Refusal:
        """The refusal of what was let in and found the engine's own queue full: a wrong estimate, and load."""
        self.room.missed(now_us)
        self.returning.budget.refused(terms.service_class, now_us)
        self.returning.may_return(attempt, now_us)
        problem = "the engine's own queue is full"
        return self.refuse_busy(Reason.ENGINE_OVERLOADED, problem, now_us, terms.service_class)

    def count(self, refusal: Refusal) -> None:
        """A refusal was given as an answer, whoever decided on it."""
        self.refused_total[refusal.reason.value] += 1

    @property
    def waiting(self) -> int:
        """Requests at the door."""
        return len(self._queue)

    def queued_work(self) -> Work:
        """What those at the door would take."""
        work = Work()
        if self.room.limits is not None:
            for ticket in self._queue:
                work.add(work_of(ticket.cost, self.room.limits))
        return work

    def closed_by(self, now_us: int) -> Reason | None:
        """The reason one more small request would be refused for now; None while the door is open."""
        if self.unavailable is not None:
            return self.unavailable
        held = self.classes.look(STANDARD, PROBE_COST, self.room, now_us, 0).held
        if held is None and len(self._queue):
            held = next(self._queue.in_turn()).held
        return None if held is None else held.reason

    # How it comes about.

    def _hopeless(self, ticket: Ticket, now_us: int) -> Refusal | None:
        """What no capacity would help: 503, 400, 504."""
        if self.unavailable is not None:
            return refusals.unavailable(self.unavailable)
        limits = self.room.limits
        assert limits is not None, "an engine is available only once it has told its limits"
        for choice in ticket.cost.choices:
            if (problem := limits.unfit_reason(choice.prompt_tokens, choice.max_tokens)) is not None:
                return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, sentence(problem))
        return MISSED if ticket.missed(now_us) else None

    def _shed_early(self, ticket: Ticket, now_us: int) -> Refusal | None:
        """The tests that ask nothing of the room."""
        limits, waited_us = self.room.limits, now_us - ticket.arrived_us
        assert limits is not None, "who is hopeless has gone before"
        if (refusal := deadlines.unreachable(ticket.cost, ticket.terms, limits, waited_us)) is not None:
            return refusal
        if ticket.attempt.number and self.returning.budget.closed_to(ticket.terms.service_class, now_us):
            return SPENT
        tokens = ticket.cost.prompt_tokens + ticket.cost.decode_tokens
        quota = self.quotas.take(ticket.terms.tenant, ticket.request_id, tokens, now_us)
        return None if quota is None else self.returning.over_quota(quota, tokens)

    def _shed_by(self, ticket: Ticket, refusal: Refusal | None, now_us: int) -> tuple[str, Look]:
        """Observe: the reason for which Enforce would refuse it, and the room there is; empty where it would not.

        What would wait at the door counts as let in, since what a wait is for mostly comes; here nobody waits.
        """
        self._door.asked(ticket, now_us)
        look = self._door.look(ticket, now_us)
        self._door.found_none(look, now_us)
        ticket.decision.looked(look)
        refusal = refusal or deadlines.too_late(look, ticket.cost, ticket.terms, now_us - ticket.arrived_us)
        if refusal is not None or look.held is None:
            return "" if refusal is None else refusal.reason.value, look
        if not self._door.is_cut(ticket, look, now_us) and self._door.wait_us(ticket, look.held, now_us) > 0:
            return "", look
        # The size guard says at the question how long it may wait that it may not.
        held = ticket.held or look.held
        ticket.decision.held(held)
        if held.reason is not Reason.TENANT_SHARE and not held.by_itself:
            self.sizes.refused(ticket.terms, ticket.cost, now_us)
        if not held.by_itself:
            self.returning.budget.refused(ticket.terms.service_class, now_us)
        return held.reason.value, look

    def _ask(self, ticket: Ticket, now_us: int) -> Permit | Refusal | Ticket:
        """Look for room; without, a place at the door where waiting may help."""
        self._door.asked(ticket, now_us)
        look = self._door.look(ticket, now_us)
        self._door.found_none(look, now_us)
        ticket.decision.looked(look)
        if (refusal := deadlines.too_late(look, ticket.cost, ticket.terms, now_us - ticket.arrived_us)) is not None:
            return refusal
        if look.held is None and not len(self._queue):
            return self._admit(ticket, look, now_us)
        self._queue.push(ticket)
        blocker = self._door.blocker(ticket, now_us)
        if look.held is None and blocker is None:
            self._queue.remove(ticket)
            return self._admit(ticket, look, now_us)
        held = ticket.held = look.held or (None if blocker is None else blocker.held)
        assert held is not None, "who waits was looked at, or stands behind one who was"
        wait_us = 0 if self._door.is_cut(ticket, look, now_us) else self._door.wait_us(ticket, held, now_us)
        if wait_us <= 0:
            self._queue.remove(ticket)
            return self._turn_away(ticket, now_us)
        ticket.deadline_us = now_us + wait_us
        ticket.decision.held(held)
        return self._make_place(ticket, now_us)

    def _make_place(self, ticket: Ticket, now_us: int) -> Ticket | Refusal:
        """A place at the door, where one too many costs somebody his."""
        last = self._door.one_too_many(ticket)
        if last is None:
            return ticket
        self._queue.remove(last)
        refusal = self._turn_away(last, now_us)
        if last is ticket:
            return refusal
        self._settle(last, refusal)
        return ticket

    def _next(self, now_us: int) -> tuple[Ticket, Permit | Refusal] | None:
        """Who goes from the door now, and with what; None when nobody does."""
        if self.unavailable is not None:
            first = next(self._queue.in_turn(), None)
            return None if first is None else (first, refusals.unavailable(self.unavailable))
        found = self._door.next_in(now_us)
        if found is None:
            return None
        ticket, look = found
        if look is not None and look.held is not None:
            return ticket, self._turn_away(ticket, now_us)
        return ticket, MISSED if look is None else self._admit_waiting(ticket, look, now_us)

    def _admit(self, ticket: Ticket, look: Look, now_us: int) -> Permit:
        assert self.room.limits is not None, "asked where something was looked at"
        self.admitted_total += 1
        self.returning.admitted(ticket.attempt, ticket.cost.prefill_tokens + ticket.cost.decode_tokens, now_us)
        work = work_of(ticket.cost, self.room.limits)
        self.demand.count("admitted", work, now_us, retry=ticket.attempt.number > 0)
        ticket.decision.admitted(now_us)
        if not ticket.decision.shed_by:
            self.sizes.admitted(ticket.terms, ticket.cost, now_us)
        engine_us = expected_us(work, self.room.limits)
        self.tenants.start(ticket.terms.tenant, ticket.request_id, engine_us, now_us)
        return self.room.reserve(ticket.request_id, ticket.cost, look, now_us)

    def _admit_waiting(self, ticket: Ticket, look: Look, now_us: int) -> Permit:
        ticket.decision.looked(look)
        return self._admit(ticket, look, now_us)

    def _released(self, entry: Entry, completed: bool, now_us: int) -> None:  # noqa: FBT001  # the ledger's callback
        self.room.released(entry, now_us, completed=completed)
        if self.room.limits is not None:
            stayed_us = now_us - entry.admitted_us
            engine_us = used_us(entry.choices, stayed_us, self.room.limits, completed=completed)
            if (tenant := self.tenants.end(entry.id, engine_us)) is not None:
                self._queue.renew(tenant)
        seen = used_tokens(entry.choices, completed=completed)
        self.quotas.settle(entry.id, seen if entry.told_tokens is None else entry.told_tokens)
        self.advance(now_us)

    def _turn_away(self, ticket: Ticket, now_us: int) -> Refusal:
        """The refusal of what holds it, or, where others wait and its tenant has more than its share, of that."""
        held, limits = ticket.held, self.room.limits
        assert held is not None, "who is refused for load was looked at"
        assert limits is not None, "and something was looked at"
        self.demand.count("shed", work_of(ticket.cost, limits), now_us, retry=ticket.attempt.number > 0)
        if self.tenants.is_over(ticket.terms.tenant) and self._queue.others_wait(ticket):
            held = Held(Reason.TENANT_SHARE, self._door.over_share(ticket), held.wait_us)
        elif held.reason is not Reason.TENANT_SHARE and not held.by_itself:
            self.sizes.refused(ticket.terms, ticket.cost, now_us)
        if not held.by_itself:
            self.returning.budget.refused(ticket.terms.service_class, now_us)
        self.returning.refused(ticket.attempt, now_us)
        return self.returning.busy(held, ticket.terms.service_class, now_us)

    def _time_for(self, count: int, now_us: int) -> int | None:
        return self.room.time_for(count, len(self.room.ledger.entries), now_us)

    def _settle(self, ticket: Ticket, verdict: Permit | Refusal) -> None:
        if isinstance(verdict, Refusal):
            self.quotas.settle(ticket.request_id, 0)
        ticket.verdict = verdict
        ticket.on_settled(verdict)
