"""The decision: who is let in now, who waits a moment at the door, and who is told when to come back.

Owns the queue at the door and the words of a refusal; whether there is room is `room`'s to say. One call decides and
reserves, so nothing can slip in between. Pure: the clock comes in with each call, randomness as an argument; a
simulator can run this very class.
Start reading at `Admission.enter`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from sluice_engine.config import LiveConfig
from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import Terms
from sluice_engine.errors import sentence
from sluice_sidecar.attempts import FIRST, Attempt
from sluice_sidecar.decisions import Decision, Decisions
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.ledger import ChoiceCost, Cost, Entry, Permit
from sluice_sidecar.room import Held, Look, Room

# Clients honour 1 to 30 s; beyond, they fall back to a pause of their own.
LEAST_RETRY_US, MOST_WAIT_US, MOST_RETRY_US = 1_000_000, 20_000_000, 30_000_000
LEAST_SPREAD_US = 1_000_000
# A few small requests may always stand at the door; beyond, no more than could run at once.
LEAST_DOOR = 4
# What `open` in the gate's state asks for.
PROBE_COST = Cost((ChoiceCost(prompt_tokens=64, max_tokens=64),))

_NO_TERMS = Terms()

_UNAVAILABLE = {
    Reason.DRAINING: "This pod is shutting down and takes no new requests; send the request again.",
    Reason.ENGINE_LOADING: "The model is still loading; try again in a moment.",
    Reason.ENGINE_DEAD: "The engine is down and is being restarted; try again in a moment.",
}
MISSED = Refusal(
    Reason.DEADLINE_MISSED,
    "The deadline of this request passed before it could be answered; ask for less, or allow more time.",
)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits at the door. Settled once: with a permit, or with the refusal of what held it."""

    request_id: str
    cost: Cost
    arrived_us: int
    """When its body was whole: the promise of a first token runs from there."""
    deadline_us: int
    held: Held
    decision: Decision
    bound_us: int | None
    """When its caller will have no more use for it; None: never."""
    on_settled: Callable[[Permit | Refusal], None]
    verdict: Permit | Refusal | None = None

    def missed(self, now_us: int) -> bool:
        """Whether its caller has no more use for it."""
        return self.bound_us is not None and now_us >= self.bound_us


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
        self.unavailable: Reason | None = Reason.ENGINE_LOADING
        self.admitted_total = 0
        self.refused_total: Counter[str] = Counter()
        self.decisions = Decisions()
        self._door: OrderedDict[str, Ticket] = OrderedDict()
        self._returning: list[int] = []
        """When those who were told to come back will be here: a heap, since a storm of refusals asks at each."""

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
        bound_us = terms.bound_us
        decision = self.decisions.priced(request_id, cost, now_us - waited_us)
        decision.attempt = attempt.number
        if self.unavailable is not None:
            return self._refuse_unavailable(self.unavailable)
        if bound_us is not None and waited_us >= bound_us:
            return MISSED
        limits = self.room.limits
        assert limits is not None, "an engine is available only once it has told its limits"
        for choice in cost.choices:
            if (problem := limits.unfit_reason(choice.prompt_tokens, choice.max_tokens)) is not None:
                return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, sentence(problem))
        look = self.room.look(cost, now_us, waited_us)
        decision.looked(look)
        held = look.held
        if held is None and not self._door:
            return self._admit(decision, cost, look, now_us)
        if held is None:
            # Nobody overtakes: it waits for what the first in line waits for.
            held = self._first.held
        wait_us = self._door_wait_us(cost, held, now_us, waited_us)
        if bound_us is not None:
            wait_us = min(wait_us, bound_us - waited_us)
        if wait_us <= 0 or len(self._door) >= max(LEAST_DOOR, limits.max_sequences):
            return self._refuse_busy(held, now_us)
        decision.held(held)
        arrived_us = now_us - waited_us
        useless_us = None if bound_us is None else arrived_us + bound_us
        ticket = Ticket(request_id, cost, arrived_us, now_us + wait_us, held, decision, useless_us, on_settled)
        self._door[request_id] = ticket
        return ticket

    def expire(self, ticket: Ticket, now_us: int) -> None:
        """Its time at the door is over: it is told what held it."""
        if self._door.pop(ticket.request_id, None) is not None:
            self._settle(ticket, MISSED if ticket.missed(now_us) else self._refuse_busy(ticket.held, now_us))
            self.advance(now_us)

    def leave(self, ticket: Ticket, now_us: int) -> None:
        """Its client left, at the door or with a permit it never heard of."""
        if self._door.pop(ticket.request_id, None) is not None:
            self.advance(now_us)
        elif isinstance(ticket.verdict, Permit):
            ticket.verdict.close(now_us)

    def advance(self, now_us: int) -> None:
        """Let in those first in line who fit now."""
        while self._door:
            ticket = self._first
            if self.unavailable is not None:
                verdict: Permit | Refusal = self._refuse_unavailable(self.unavailable)
            elif ticket.missed(now_us):
                verdict = MISSED
            else:
                look = self.room.look(ticket.cost, now_us, now_us - ticket.arrived_us)
                if look.held is not None:
                    ticket.held = look.held
                    return
                ticket.decision.looked(look)
                verdict = self._admit(ticket.decision, ticket.cost, look, now_us)
            del self._door[ticket.request_id]
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
        return len(self._door)

    def closed_by(self, now_us: int) -> Reason | None:
        """The reason one more small request would be refused for now; None while the door is open."""
        if self.unavailable is not None:
            return self.unavailable
        held = self.room.look(PROBE_COST, now_us, 0).held
        if held is None and self._door:
            held = self._first.held
        return None if held is None else held.reason

    # How it comes about.

    @property
    def _first(self) -> Ticket:
        return next(iter(self._door.values()))

    def _door_wait_us(self, cost: Cost, held: Held, now_us: int, waited_us: int) -> int:
        """How long it may wait: `maxWait`, and a quarter of what the promise leaves it."""
        wait_us = min(self._max_wait_us, (self.room.slack_us(cost, now_us) - waited_us) // 4)
        if held.wait_us is not None and held.reason is not Reason.TTFT_PROMISE:
            ahead_us = self.room.time_for(len(self._door), len(self.room.ledger.entries), now_us) or 0
            # Twice: a mean is no promise, and a wait that may well help is worth more than a quick refusal.
            if held.wait_us + ahead_us > 2 * wait_us:
                return 0
        return wait_us

    def _admit(self, decision: Decision, cost: Cost, look: Look, now_us: int) -> Permit:
        self.admitted_total += 1
        decision.admitted(now_us)
        return self.room.reserve(decision.request_id, cost, look, now_us)

    def _released(self, entry: Entry, completed: bool, now_us: int) -> None:  # noqa: FBT001  # the ledger's callback
        self.room.released(entry, now_us, completed=completed)
        self.advance(now_us)

    def _refuse_unavailable(self, reason: Reason) -> Refusal:
        return Refusal(reason, _UNAVAILABLE[reason])

    def _refuse_busy(self, held: Held, now_us: int) -> Refusal:
        retry_us = self._retry_after_us(held.wait_us, now_us)
        back = "" if retry_us is None else f" Come back in {retry_us / 1e6:.1f} s."
        return Refusal(held.reason, f"The model is busy: {held.problem}.{back}", retry_us)

    def _retry_after_us(self, wait_us: int | None, now_us: int) -> int | None:
        """When to come back, drawn so that the crowd spreads over the time it takes to let it in."""
        if wait_us is None:
            return None
        lo = min(MOST_WAIT_US, max(LEAST_RETRY_US, wait_us))
        while self._returning and self._returning[0] <= now_us:
            heappop(self._returning)
        crowd_us = self.room.time_for(len(self._returning) + 1, len(self.room.ledger.entries), now_us) or 0
        hi = min(MOST_RETRY_US, lo + max(LEAST_SPREAD_US, crowd_us))
        retry_us = self._draw(lo, hi)
        heappush(self._returning, now_us + retry_us)
        return retry_us

    @staticmethod
    def _settle(ticket: Ticket, verdict: Permit | Refusal) -> None:
        ticket.verdict = verdict
        ticket.on_settled(verdict)
