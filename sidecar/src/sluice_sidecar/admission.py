"""The decision: who is let in now, who waits a moment at the door, and who is told when to come back.

Owns the ledger, the steered ceiling and the queue at the door. One call decides and reserves, so nothing can slip in
between. Pure: the clock comes in with each call, randomness as an argument; the simulator runs this very class.
Start reading at `Admission.enter`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from sluice_engine.config import LiveConfig
from sluice_engine.core.state import EngineState
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimate import TokenRatio
from sluice_sidecar.ledger import ChoiceCost, Cost, Entry, Ledger, Permit, Progress
from sluice_sidecar.limits import Ceiling, Limits, growth, predicted_peak_blocks, predicted_ttft_us, prefill_share
from sluice_sidecar.measure import Bias, Residence
from sluice_sidecar.state import Freshness

# What stale state costs: room for what the engine did since.
STALE_FACTOR = 0.8
# Concurrency is remembered for a minute, to halve it when the engine's state is out of sight.
_CONCURRENCY_SLOT_US = 20_000_000
_CONCURRENCY_SLOTS = 3
LEAST_RETRY_US, MOST_WAIT_US, MOST_RETRY_US = 1_000_000, 20_000_000, 30_000_000
# A few small requests may always stand at the door; beyond, no more than could run at once.
_LEAST_DOOR = 4
# What `open` in the gate's state asks for.
PROBE_COST = Cost((ChoiceCost(prompt_tokens=64, max_tokens=64),))

_UNAVAILABLE = {
    Reason.DRAINING: "This pod is shutting down and takes no new requests; send the request again.",
    Reason.ENGINE_LOADING: "The model is still loading; try again in a moment.",
    Reason.ENGINE_DEAD: "The engine is down and is being restarted; try again in a moment.",
}


@dataclass(frozen=True, slots=True)
class Held:
    """What keeps a request out now."""

    reason: Reason
    message: str
    wait_us: int | None
    """Measured time until there is room; None while the drain is unmeasured."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits at the door. Settled once: with a permit, or with the refusal of what held it."""

    request_id: str
    cost: Cost
    deadline_us: int
    held: Held
    on_settled: Callable[[Permit | Refusal], None]
    verdict: Permit | Refusal | None = None


class Admission:
    """The door."""

    def __init__(
        self, live: LiveConfig, *, stale_after_us: int, blind_after_us: int, draw: Callable[[int, int], int]
    ) -> None:
        """`draw(lo, hi)` is a random whole number between both, evenly."""
        self._live = live
        self._stale_after_us = stale_after_us
        self._blind_after_us = blind_after_us
        self._draw = draw
        self.ledger = Ledger(on_release=self._released)
        self.ceiling = Ceiling(live.admission.kv_ceiling_percent, live.admission.preemptions_per_minute)
        self.ratio = TokenRatio()
        self.bias = Bias()
        self.residence = Residence()
        self.limits: Limits | None = None
        self.unavailable: Reason | None = Reason.ENGINE_LOADING
        self.admitted_total = 0
        self.refused_total: Counter[str] = Counter()
        self.predictions_us: dict[str, int] = {}
        """Predicted time to first token by request id, before the bias; for the stream to learn from."""
        self._door: OrderedDict[str, Ticket] = OrderedDict()
        self._returning: deque[int] = deque()
        self._state_us: int | None = None
        self._step_ends_us = 0
        self._concurrency: deque[tuple[int, int]] = deque()

    # What the engine tells.

    def observe(self, state: EngineState, as_of_us: int, now_us: int) -> None:
        """Take in the engine's state, true as of `as_of_us`, and let in who fits now."""
        self.limits = Limits.from_state(state, self._live.slo) or self.limits
        self._state_us = as_of_us
        self._step_ends_us = as_of_us + max(0, state.step_predicted_us - state.step_running_us) * (
            state.step_running_us > 0
        )
        for entry in self.ledger.apply(state, now_us):
            if entry.cost.text_bytes:
                self.ratio.learn(entry.cost.text_bytes, entry.choices[0].prompt_tokens - entry.cost.overhead_tokens)
        self.ceiling.observe(state.boot_id, state.preemptions_total, now_us)
        self._remember_concurrency(now_us)
        self.ledger.expire(now_us)
        self.advance(now_us)

    def set_unavailable(self, reason: Reason | None, now_us: int) -> None:
        """No capacity exists, for this reason; None: it does."""
        if reason is Reason.ENGINE_DEAD and self.unavailable is not reason:
            self.ledger.forget_engine()
        self.unavailable = reason
        self.ledger.expire(now_us)
        self.advance(now_us)

    def freshness(self, now_us: int) -> Freshness:
        """How far the engine's state can be trusted."""
        if self._state_us is None:
            return "none"
        age_us = now_us - self._state_us
        if age_us > self._blind_after_us:
            return "blind"
        return "stale" if age_us > self._stale_after_us else "fresh"

    def state_age_us(self, now_us: int) -> int | None:
        """Age of the state in use."""
        return None if self._state_us is None else now_us - self._state_us

    # What a request asks.

    def enter(
        self, request_id: str, cost: Cost, now_us: int, on_settled: Callable[[Permit | Refusal], None]
    ) -> Permit | Refusal | Ticket:
        """Decide and reserve in one go. A `Ticket` waits in order; `on_settled` is called once, later."""
        if self.unavailable is not None:
            return self._refuse_unavailable(self.unavailable)
        assert self.limits is not None, "an engine is available only once it has derived its limits"
        for choice in cost.choices:
            if (problem := self.limits.unfit_reason(choice.prompt_tokens, choice.max_tokens)) is not None:
                return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, f"{problem[0].upper()}{problem[1:]}.")
        held = self._held(cost, now_us)
        if held is None and not self._door:
            return self._admit(request_id, cost, now_us)
        if held is None:
            # Nobody overtakes: it waits for what the first in line waits for.
            held = next(iter(self._door.values())).held
        wait_us = self._door_wait_us(cost, held, now_us)
        if wait_us <= 0 or len(self._door) >= max(_LEAST_DOOR, self.limits.max_sequences):
            return self._refuse_busy(held, now_us)
        ticket = Ticket(request_id, cost, now_us + wait_us, held, on_settled)
        self._door[request_id] = ticket
        return ticket

    def expire(self, ticket: Ticket, now_us: int) -> None:
        """Its time at the door is over: it is told what held it."""
        if self._door.pop(ticket.request_id, None) is not None:
            self._settle(ticket, self._refuse_busy(ticket.held, now_us))
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
            ticket = next(iter(self._door.values()))
            if self.unavailable is not None:
                verdict: Permit | Refusal = self._refuse_unavailable(self.unavailable)
            elif (held := self._held(ticket.cost, now_us)) is not None:
                ticket.held = held
                return
            else:
                verdict = self._admit(ticket.request_id, ticket.cost, now_us)
            # It may have left the line meanwhile: admitting never releases, so it has not.
            del self._door[ticket.request_id]
            self._settle(ticket, verdict)

    def refuse_unavailable(self) -> Refusal | None:
        """The refusal while no capacity exists; None while it does."""
        return None if self.unavailable is None else self._refuse_unavailable(self.unavailable)

    def refuse_busy(self, reason: Reason, problem: str, now_us: int) -> Refusal:
        """Refuse for load that was found outside the tests here."""
        return self._refuse_busy(Held(reason, problem, self._time_for(1, len(self.ledger.entries), now_us)), now_us)

    def count(self, refusal: Refusal) -> None:
        """A refusal was given as an answer, whoever decided on it."""
        self.refused_total[refusal.reason.value] += 1

    def first_token(self, permit: Permit, now_us: int) -> None:
        """An admitted request's first token went out: learn how far the prediction was off."""
        predicted_us = self.predictions_us.pop(permit.entry.id, None)
        if predicted_us:
            self.bias.learn(predicted_us, now_us - permit.entry.admitted_us)

    # What others read.

    @property
    def waiting(self) -> int:
        """Requests at the door."""
        return len(self._door)

    def ledger_blocks(self) -> int:
        """Blocks that what was let in holds now, its whole known input counted."""
        if self.limits is None:
            return 0
        size = self.limits.block_tokens
        return sum(-(-choice.known_tokens // size) for choice in self.ledger.live())

    def peak_blocks(self, cost: Cost | None = None) -> int:
        """The future peak, with one more request or without."""
        return 0 if self.limits is None else self._peak(self.limits, list(self.ledger.live()), cost)

    def closed_by(self, now_us: int) -> Reason | None:
        """The reason one more small request would be refused for now; None while the door is open."""
        if self.unavailable is not None:
            return self.unavailable
        held = self._held(PROBE_COST, now_us)
        if held is None and self._door:
            held = next(iter(self._door.values())).held
        return None if held is None else held.reason

    def sequences(self, now_us: int) -> int:
        """Choices that may run at once, given how fresh the engine's state is."""
        if self.limits is None:
            return 1
        freshness = self.freshness(now_us)
        if freshness == "fresh":
            return self.limits.max_sequences
        if freshness == "stale":
            return max(1, int(self.limits.max_sequences * STALE_FACTOR))
        return max(1, max((count for _, count in self._concurrency), default=1) // 2)

    def ceiling_blocks(self, now_us: int) -> int:
        """Blocks that the future peak may reach."""
        if self.limits is None:
            return 0
        share = self.ceiling.share * (1.0 if self.freshness(now_us) == "fresh" else STALE_FACTOR)
        return int(self.limits.total_blocks * share)

    # The tests, cheap first.

    def _held(self, cost: Cost, now_us: int) -> Held | None:
        limits = self.limits
        assert limits is not None, "nothing is held while no limits are known: it is refused"
        live = self._live_now(now_us)
        if not live:
            # An idle engine takes one that fits, whatever was predicted.
            return None
        sequences = self.sequences(now_us)
        if (excess := len(live) + len(cost.choices) - sequences) > 0:
            wait_us = self._time_for(excess, len(live), now_us)
            return Held(Reason.SLOTS, f"{len(live)} of {sequences} slots are taken", wait_us)
        ceiling = self.ceiling_blocks(now_us)
        if (peak := self._peak(limits, live, cost)) > ceiling:
            wait_us = self._time_for(peak - ceiling, self.ledger_blocks(), now_us)
            problem = f"with this request the KV cache would come to hold {peak} blocks, and {ceiling} may be used"
            return Held(Reason.KV_PEAK, problem, wait_us)
        if self._live.slo.enforcement == "Observe":
            return None
        predicted_us = int(self._predicted_ttft_us(limits, live, cost, now_us) * self.bias.factor)
        promise_us = self._live.slo.ttft_promise_us(cost.longest_prompt_tokens)
        if predicted_us > promise_us:
            problem = (
                f"the first token is predicted after {predicted_us / 1e6:.1f} s, "
                f"and {promise_us / 1e6:.1f} s is promised"
            )
            queue_us = predicted_us - promise_us if any(choice.prefilling for choice in live) else None
            return Held(Reason.TTFT_PROMISE, problem, queue_us or self._time_for(1, len(live), now_us))
        return None

    def _live_now(self, now_us: int) -> list[Progress]:
        if self.freshness(now_us) == "blind":
            # What an old state listed beside the ledger says nothing about now.
            return [choice for entry in self.ledger.entries.values() for choice in entry.choices if not choice.gone]
        return list(self.ledger.live())

    def _peak(self, limits: Limits, live: list[Progress], cost: Cost | None) -> int:
        entering = [] if cost is None else [Progress(c.prompt_tokens, c.max_tokens) for c in cost.choices]
        choices = live + entering
        prefilling = sum(choice.prefilling for choice in choices)
        share = prefill_share(limits, len(choices) - prefilling, prefilling)
        return predicted_peak_blocks(
            (growth(c.known_tokens, c.remaining_tokens, c.prompt_tokens + c.max_tokens, share) for c in choices),
            limits.block_tokens,
        )

    def _predicted_ttft_us(self, limits: Limits, live: list[Progress], cost: Cost, now_us: int) -> int:
        # Everybody ahead decodes by the time this one prefills.
        return predicted_ttft_us(
            limits,
            queue_tokens=sum(choice.remaining_tokens for choice in live if choice.prefilling),
            own_tokens=cost.prefill_tokens,
            decodes=len(live),
            step_left_us=max(0, self._step_ends_us - now_us),
        )

    def _time_for(self, needed: int, inside: int, now_us: int) -> int | None:
        """Time until `needed` of the `inside` are free again, at the rate at which requests leave now."""
        mean_us = self.residence.mean_us
        if mean_us is None or not inside:
            return None
        entries = self.ledger.entries.values()
        # Those inside may be slower than those that left: they have stayed this long already.
        ages_us = sum(now_us - entry.admitted_us for entry in entries) // max(1, len(entries))
        return needed * max(mean_us, ages_us) // inside

    def _door_wait_us(self, cost: Cost, held: Held, now_us: int) -> int:
        """How long it may wait: `maxWait`, and a quarter of what the promise leaves it."""
        assert self.limits is not None
        predicted_us = self._predicted_ttft_us(self.limits, self._live_now(now_us), cost, now_us) * self.bias.factor
        slack_us = self._live.slo.ttft_promise_us(cost.longest_prompt_tokens) - int(predicted_us)
        wait_us = min(self._live.admission.max_wait_us, slack_us // 4)
        if held.wait_us is not None and held.reason is not Reason.TTFT_PROMISE:
            ahead_us = self._time_for(len(self._door), max(1, len(self.ledger.entries)), now_us) or 0
            # Twice: a mean is no promise, and a wait that may well help is worth more than a quick refusal.
            if held.wait_us + ahead_us > 2 * wait_us:
                return 0
        return wait_us

    # What follows from a decision.

    def _admit(self, request_id: str, cost: Cost, now_us: int) -> Permit:
        assert self.limits is not None
        self.predictions_us[request_id] = self._predicted_ttft_us(self.limits, self._live_now(now_us), cost, now_us)
        self.admitted_total += 1
        permit = self.ledger.reserve(request_id, cost, now_us)
        self._remember_concurrency(now_us)
        return permit

    def _released(self, entry: Entry, completed: bool, now_us: int) -> None:  # noqa: FBT001  # the ledger's callback
        self.predictions_us.pop(entry.id, None)
        if completed:
            self.residence.add(now_us - entry.admitted_us)
        self.advance(now_us)

    def _refuse_unavailable(self, reason: Reason) -> Refusal:
        return Refusal(reason, _UNAVAILABLE[reason])

    def _refuse_busy(self, held: Held, now_us: int) -> Refusal:
        retry_us = self._retry_after_us(held.wait_us, now_us)
        back = "" if retry_us is None else f" Come back in {retry_us / 1e6:.1f} s."
        return Refusal(held.reason, f"The model is busy: {held.message}.{back}", retry_us)

    def _retry_after_us(self, wait_us: int | None, now_us: int) -> int | None:
        """When to come back, drawn so that the crowd spreads over the time it takes to let it in."""
        if wait_us is None:
            return None
        lo = min(MOST_WAIT_US, max(LEAST_RETRY_US, wait_us))
        while self._returning and self._returning[0] <= now_us:
            self._returning.popleft()
        crowd_us = self._time_for(len(self._returning) + 1, max(1, len(self.ledger.entries)), now_us) or 0
        hi = min(MOST_RETRY_US, lo + max(1_000_000, crowd_us))
        retry_us = self._draw(lo, hi)
        self._returning.append(now_us + retry_us)
        return retry_us

    def _settle(self, ticket: Ticket, verdict: Permit | Refusal) -> None:
        ticket.verdict = verdict
        ticket.on_settled(verdict)

    def _remember_concurrency(self, now_us: int) -> None:
        if self.freshness(now_us) != "fresh":
            return
        slot, running = now_us // _CONCURRENCY_SLOT_US, sum(1 for _ in self.ledger.live())
        if not self._concurrency or self._concurrency[-1][0] != slot:
            self._concurrency.append((slot, 0))
            if len(self._concurrency) > _CONCURRENCY_SLOTS:
                self._concurrency.popleft()
        self._concurrency[-1] = (slot, max(running, self._concurrency[-1][1]))
