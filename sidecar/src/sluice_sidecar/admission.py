"""The decision: who is let in now, who waits a moment at the door, and who is told when to come back.

Owns the order of the tests and the words of a refusal. Whether there is room is `room`'s to say, under which ceiling
`classes`', in which order those at the door are looked at `fairness`'s. One call decides and reserves, so nothing can
slip in between. Pure: the clock comes in with each call, randomness as an argument; a simulator runs this very class.
Start reading at `Admission.enter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sluice_engine.config import Enforcement, LiveConfig
from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import STANDARD, Terms
from sluice_engine.errors import sentence
from sluice_sidecar import deadlines
from sluice_sidecar.attempts import FIRST, Attempt, Attempts
from sluice_sidecar.classes import Classes
from sluice_sidecar.decisions import Decisions
from sluice_sidecar.demand import Demand, Verdict, Work, work_of
from sluice_sidecar.errors import RateLimit, Reason, Refusal
from sluice_sidecar.fairness import Queue, Ticket
from sluice_sidecar.ledger import ChoiceCost, Cost, Entry, Permit
from sluice_sidecar.quotas import Quotas
from sluice_sidecar.retry_after import LEAST_SPREAD_US, LEAST_US, RetryAfter
from sluice_sidecar.retry_budget import SPENT, RetryBudget
from sluice_sidecar.room import Held, Look, Room
from sluice_sidecar.sizes import SizeGuard
from sluice_sidecar.tenants import KEPT_PERCENT, Tenants, expected_us, used_tokens, used_us

__all__ = ["MISSED", "Admission", "Ticket"]

# A few small requests may always stand at the door; beyond, no more than could run at once.
LEAST_DOOR = 4
# What `open` in the gate's state asks for.
PROBE_COST = Cost((ChoiceCost(prompt_tokens=64, max_tokens=64),))

_NO_TERMS = Terms()
# Room that is there, and kept for certain others: those go before whoever is held by this.
_KEPT_FOR_OTHERS = frozenset((Reason.SIZE_GUARD, Reason.TENANT_SHARE))

_UNAVAILABLE = {
    Reason.DRAINING: "This pod is shutting down and takes no new requests; send the request again.",
    Reason.ENGINE_LOADING: "The model is still loading; try again in a moment.",
    Reason.ENGINE_DEAD: "The engine is down and is being restarted; try again in a moment.",
}
MISSED = Refusal(
    Reason.DEADLINE_MISSED,
    "The deadline of this request passed before it could be answered; ask for less, or allow more time.",
)


class Admission:
    """The door."""

    def __init__(
        self, live: LiveConfig, *, stale_after_us: int, blind_after_us: int, draw: Callable[[int, int], int]
    ) -> None:
        """`draw(lo, hi)` is a random whole number between both, evenly."""
        self._max_wait_us = live.admission.max_wait_us
        self._draw = draw
        self.room = Room(live, stale_after_us=stale_after_us, blind_after_us=blind_after_us)
        self.room.ledger.on_release = self._released
        self.classes = Classes(live.admission.classes)
        self.tenants = Tenants(live.admission.tenants)
        self.quotas = Quotas(live.admission.tenants)
        self.sizes = SizeGuard()
        self.attempts = Attempts()
        self.retry_budget = RetryBudget(live.admission.retry_budget_percent)
        self.retry_after = RetryAfter(draw)
        self.mode: Enforcement = live.admission.mode
        self.unavailable: Reason | None = Reason.ENGINE_LOADING
        self.admitted_total = 0
        self.refused_total: Counter[str] = Counter()
        self.retries_total: Counter[str] = Counter()
        """Attempts that were retries, by verdict."""
        self.decisions = Decisions()
        self.demand = Demand()
        self._queue = Queue(self.tenants, live.scheduling.aging_interval_us)

    def configure(self, live: LiveConfig, now_us: int) -> None:
        """Take other settings; nobody who is inside or waits is turned out for them."""
        self._max_wait_us = live.admission.max_wait_us
        self.mode = live.admission.mode
        self.room.configure(live)
        self.retry_budget.configure(live.admission.retry_budget_percent)
        self.classes.configure(live.admission.classes)
        self.tenants.configure(live.admission.tenants)
        self.quotas.configure(live.admission.tenants, now_us)
        self._queue.configure(live.scheduling.aging_interval_us)
        self.advance(now_us)

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
        attempt = replace(attempt, number=self.attempts.number(attempt, now_us))
        decision.attempt = attempt.number
        ticket = Ticket(request_id, cost, terms, now_us - waited_us, decision, on_settled, attempt)
        if (refusal := self._hopeless(ticket, now_us)) is not None:
            return refusal
        refusal = self._shed_early(ticket, now_us)
        if self.mode == "Observe":
            decision.shed_by, look = self._shed_by(ticket, refusal, now_us)
            return self._admit(ticket, look, now_us)
        if refusal is not None:
            self._may_come_back(ticket, now_us)
            return refusal
        verdict = self._ask(ticket, now_us)
        if isinstance(verdict, Refusal):
            self.quotas.settle(request_id, 0)
        return verdict

    def expire(self, ticket: Ticket, now_us: int) -> None:
        """Its time at the door is over: it is told what held it."""
        if self._queue.remove(ticket):
            self._settle(ticket, MISSED if ticket.missed(now_us) else self._turn_away(ticket, now_us))
            self.advance(now_us)

    def leave(self, ticket: Ticket, now_us: int) -> None:
        """Its client left, at the door or with a permit it never heard of."""
        if self._queue.remove(ticket):
            self.quotas.settle(ticket.request_id, 0)
            self._may_come_back(ticket, now_us)
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
        return None if self.unavailable is None else self._refuse_unavailable(self.unavailable)

    def refuse_busy(self, reason: Reason, problem: str, now_us: int) -> Refusal:
        """The refusal for load that was found outside the tests here."""
        wait_us = self.room.time_for(1, len(self.room.ledger.entries), now_us)
        return self._refuse_busy(Held(reason, problem, wait_us), now_us)

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
            return self._refuse_unavailable(self.unavailable)
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
        if ticket.attempt.number and self.retry_budget.closed_to(ticket.terms.service_class, now_us):
            return SPENT
        tokens = ticket.cost.prompt_tokens + ticket.cost.decode_tokens
        quota = self.quotas.take(ticket.terms.tenant, ticket.request_id, tokens, now_us)
        return None if quota is None else self._refuse_quota(quota, tokens)

    def _shed_by(self, ticket: Ticket, refusal: Refusal | None, now_us: int) -> tuple[str, Look]:
        """Observe: the reason for which Enforce would refuse it, and the room there is; empty where it would not.

        What would wait at the door counts as let in, since what a wait is for mostly comes; here nobody waits.
        """
        look = self._look(ticket, now_us)
        ticket.decision.looked(look)
        refusal = refusal or deadlines.too_late(look, ticket.cost, ticket.terms, now_us - ticket.arrived_us)
        if refusal is not None or look.held is None:
            return "" if refusal is None else refusal.reason.value, look
        if not self._is_cut(ticket, look, now_us) and self._door_wait_us(ticket, look.held, now_us) > 0:
            return "", look
        ticket.decision.held(look.held)
        self.retry_budget.refused(ticket.terms.service_class, now_us)
        return look.held.reason.value, look

    def _ask(self, ticket: Ticket, now_us: int) -> Permit | Refusal | Ticket:
        """Look for room; without, a place at the door where waiting may help."""
        self.tenants.asked(ticket.terms.tenant, ticket.cost, now_us)
        look = self._look(ticket, now_us)
        ticket.decision.looked(look)
        if (refusal := deadlines.too_late(look, ticket.cost, ticket.terms, now_us - ticket.arrived_us)) is not None:
            return refusal
        if look.held is None and not len(self._queue):
            return self._admit(ticket, look, now_us)
        self._queue.push(ticket)
        blocker = self._blocker(ticket, now_us)
        if look.held is None and blocker is None:
            self._queue.remove(ticket)
            return self._admit(ticket, look, now_us)
        held = ticket.held = look.held or (None if blocker is None else blocker.held)
        assert held is not None, "who waits was looked at, or stands behind one who was"
        wait_us = 0 if self._is_cut(ticket, look, now_us) else self._door_wait_us(ticket, held, now_us)
        if wait_us <= 0:
            self._queue.remove(ticket)
            return self._turn_away(ticket, now_us)
        ticket.deadline_us = now_us + wait_us
        ticket.decision.held(held)
        return self._make_place(ticket, now_us)

    def _make_place(self, ticket: Ticket, now_us: int) -> Ticket | Refusal:
        """The door holds as many as could run at once; one too many, and somebody goes."""
        assert self.room.limits is not None, "asked where something was looked at"
        if len(self._queue) <= max(LEAST_DOOR, self.room.limits.max_sequences):
            return ticket
        last = self._queue.superfluous(ticket)
        self._queue.remove(last)
        refusal = self._turn_away(last, now_us)
        if last is ticket:
            return refusal
        self._settle(last, refusal)
        return ticket

    def _next(self, now_us: int) -> tuple[Ticket, Permit | Refusal] | None:
        """Who goes from the door now, and with what; None when nobody does."""
        for ticket in self._queue.in_turn():
            if self.unavailable is not None:
                return ticket, self._refuse_unavailable(self.unavailable)
            if ticket.missed(now_us):
                return ticket, MISSED
            look = self._look(ticket, now_us)
            if look.held is None:
                return ticket, self._admit_waiting(ticket, look, now_us)
            ticket.held = look.held
            if look.held.reason in _KEPT_FOR_OTHERS:
                return self._next_kept_for(ticket, now_us)
            # Its class is full; a more urgent one that it stands before by its age may not be.
            if look.held.reason is not Reason.CLASS_CEILING:
                return None
        return None

    def _next_kept_for(self, blocker: Ticket, now_us: int) -> tuple[Ticket, Permit] | None:
        """The first at the door for whom the one whose turn it is must leave room, if it fits."""
        for ticket in self._queue:
            if self._is_kept_for(ticket, blocker, now_us):
                look = self._look(ticket, now_us)
                return None if look.held is not None else (ticket, self._admit_waiting(ticket, look, now_us))
        return None

    def _is_kept_for(self, ticket: Ticket, blocker: Ticket, now_us: int) -> bool:
        if ticket.terms.service_class != blocker.terms.service_class:
            return False
        if blocker.held is not None and blocker.held.reason is Reason.TENANT_SHARE:
            return not self.tenants.kept_from(ticket.terms.tenant, now_us)
        kept = self.sizes.kept_for(blocker.terms, blocker.cost, now_us)
        return kept is not None and self.sizes.is_as_large(ticket.cost, kept)

    def _blocker(self, ticket: Ticket, now_us: int) -> Ticket | None:
        """Behind whom it has to wait; None when it is its turn."""
        for first in self._queue.in_turn():
            if first is ticket:
                return None
            assert first.held is not None, "who waits was looked at, or stands behind one who was"
            if first.held.reason in _KEPT_FOR_OTHERS and self._is_kept_for(ticket, first, now_us):
                return None
            if first.held.reason is not Reason.CLASS_CEILING:
                return first
        return first

    def _look(self, ticket: Ticket, now_us: int) -> Look:
        """The room there is for it, and that it leaves: for other tenants, and for a longer request."""
        service_class, cost = ticket.terms.service_class, ticket.cost
        look = self.classes.look(service_class, cost, self.room, now_us, now_us - ticket.arrived_us)
        if look.held is None:
            look.held = deadlines.held_by_own_promise(look, ticket.terms, now_us - ticket.arrived_us)
        if look.held is not None:
            return look
        others = self.tenants.kept_from(ticket.terms.tenant, now_us)
        if others:
            wanted = Cost(cost.choices + others)
            beside = self.classes.look(service_class, wanted, self.room, now_us, 0, less_percent=KEPT_PERCENT)
            if beside.held is not None:
                problem = self._over_share(ticket)
                look.held = Held(Reason.TENANT_SHARE, problem, beside.held.wait_us)
                return look
        kept = self.sizes.kept_for(ticket.terms, cost, now_us)
        if kept is None:
            return look
        both = self.classes.look(service_class, Cost(cost.choices + kept.choices), self.room, now_us, 0)
        if both.held is not None:
            tokens = kept.prompt_tokens + kept.decode_tokens
            problem = f"room is kept for longer requests (about {tokens} tokens) that were refused before"
            look.held = Held(Reason.SIZE_GUARD, problem, both.held.wait_us)
        return look

    def _is_cut(self, ticket: Ticket, look: Look, now_us: int) -> bool:
        """Whether its class is full without it: nothing that is about to end would let it in."""
        if look.held is None or look.held.reason is not Reason.CLASS_CEILING:
            return False
        return self.classes.is_cut(ticket.terms.service_class, self.room, now_us)

    def _door_wait_us(self, ticket: Ticket, held: Held, now_us: int) -> int:
        """How long it may wait: `maxWait`, a quarter of what the promise leaves it, and no longer than is of use."""
        waited_us = now_us - ticket.arrived_us
        wait_us = min(self._max_wait_us, (self.room.slack_us(ticket.cost, now_us) - waited_us) // 4)
        if held.wait_us is not None and held.reason is not Reason.TTFT_PROMISE:
            inside = len(self.room.ledger.entries)
            ahead_us = self.room.time_for(self._queue.ahead_of(ticket), inside, now_us) or 0
            # Twice: a mean is no promise, and a wait that may well help is worth more than a quick refusal.
            if held.wait_us + ahead_us > 2 * wait_us:
                return 0
        if self.sizes.is_ahead(ticket.terms, ticket.cost) and not self.tenants.is_crowded(ticket.terms.tenant):
            problem = "longer requests, which are let in less often, go before those that have to wait"
            ticket.held = Held(Reason.SIZE_GUARD, problem, held.wait_us)
            return 0
        bounds_us = [bound for bound in (ticket.terms.bound_us, ticket.terms.door_us) if bound is not None]
        return min([wait_us, *(bound - waited_us for bound in bounds_us)])

    def _admit(self, ticket: Ticket, look: Look, now_us: int) -> Permit:
        assert self.room.limits is not None, "asked where something was looked at"
        self.admitted_total += 1
        is_retry = ticket.attempt.number > 0
        self.retries_total["admitted"] += is_retry
        self.retry_budget.admitted(ticket.cost.prefill_tokens + ticket.cost.decode_tokens, now_us, is_retry=is_retry)
        self._count("admitted", ticket, now_us)
        ticket.decision.admitted(now_us)
        self.sizes.admitted(ticket.terms, ticket.cost, now_us)
        engine_us = expected_us(ticket.cost, self.room.limits)
        self.tenants.start(ticket.terms.tenant, ticket.request_id, engine_us)
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
        self.quotas.settle(entry.id, used_tokens(entry.choices, completed=completed))
        self.advance(now_us)

    def _count(self, verdict: Verdict, ticket: Ticket, now_us: int) -> None:
        assert self.room.limits is not None, "asked where something was looked at"
        work = work_of(ticket.cost, self.room.limits)
        self.demand.count(verdict, work, now_us, retry=ticket.attempt.number > 0)

    def _refuse_unavailable(self, reason: Reason) -> Refusal:
        return Refusal(reason, _UNAVAILABLE[reason])

    def _refuse_quota(self, quota: RateLimit, tokens: int) -> Refusal:
        # Not before the quota has room again, whatever else is said of when to come back.
        wait_us = max(LEAST_US, quota.wait_us)
        retry_us = self._draw(wait_us, wait_us + LEAST_SPREAD_US)
        message = (
            f"The quota of this tenant is used up: it is {quota.per_second} tokens per second and {quota.limit_tokens} "
            f"at once, this request needs about {tokens}, and {quota.remaining_tokens} are left. "
            f"Come back in {retry_us / 1e6:.1f} s."
        )
        return Refusal(Reason.TENANT_QUOTA, message, retry_us, rate_limit=quota)

    def _over_share(self, ticket: Ticket) -> str:
        has, due = self.tenants.shares_percent(ticket.terms.tenant)
        return f"this tenant has {has} % of what runs, its share is {due} %, and others ask for theirs"

    def _turn_away(self, ticket: Ticket, now_us: int) -> Refusal:
        """The refusal of what holds it, or, where others wait and its tenant has more than its share, of that."""
        held = ticket.held
        assert held is not None, "who is refused for load was looked at"
        self._count("shed", ticket, now_us)
        has, due = self.tenants.shares_percent(ticket.terms.tenant)
        if has > due and self._queue.others_wait(ticket):
            held = Held(Reason.TENANT_SHARE, self._over_share(ticket), held.wait_us)
        elif held.reason is not Reason.TENANT_SHARE:
            self.sizes.refused(ticket.terms, ticket.cost, now_us)
        self.retry_budget.refused(ticket.terms.service_class, now_us)
        self._may_come_back(ticket, now_us)
        return self._refuse_busy(held, now_us)

    def _may_come_back(self, ticket: Ticket, now_us: int) -> None:
        """It got no answer for load: told to or not, the same body may be here again."""
        self.attempts.turned_away(ticket.attempt, now_us)
        self.retries_total["refused"] += ticket.attempt.number > 0

    def _refuse_busy(self, held: Held, now_us: int) -> Refusal:
        retry_us = self.retry_after.delay_us(
            held.wait_us, lambda count: self.room.time_for(count, len(self.room.ledger.entries), now_us), now_us
        )
        back = "" if retry_us is None else f" Come back in {retry_us / 1e6:.1f} s."
        return Refusal(held.reason, f"The model is busy: {held.problem}.{back}", retry_us, wait_us=held.wait_us)

    def _settle(self, ticket: Ticket, verdict: Permit | Refusal) -> None:
        if isinstance(verdict, Refusal):
            self.quotas.settle(ticket.request_id, 0)
        ticket.verdict = verdict
        ticket.on_settled(verdict)
