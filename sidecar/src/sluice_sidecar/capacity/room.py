"""The room in the engine: what is inside, what its state says, and whether one more fits.

Owns the ledger, the steered ceiling and what is learned from what came and went. Must not know who waits, what a
refusal says, or HTTP. Pure: the clock comes in with each call.
"""

from __future__ import annotations

import math

from sluice_engine.core.state import EngineState
from sluice_engine.live_config import LiveConfig
from sluice_sidecar.capacity.ceiling import Ceiling
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.freshness import Sight
from sluice_sidecar.capacity.inside import Inside
from sluice_sidecar.capacity.learned import Learned
from sluice_sidecar.capacity.ledger import Entry, Ledger, Permit, progress_of
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.errors import Reason
from sluice_sidecar.estimates.pricing import Pricing
from sluice_sidecar.telemetry.measure import RecentMost
from sluice_sidecar.telemetry.state import Freshness

# What is expected of an answer is a high quantile; of lengths spread as those of chats the mean has this much of it.
MEAN_OF_EXPECTED = 0.7
# What stale state costs: room for what the engine did since.
STALE_FACTOR = 0.8


class Room:
    """The engine's capacity, as the gate knows it."""

    def __init__(self, live: LiveConfig, *, stale_after_us: int, blind_after_us: int) -> None:
        self._live = live
        self.sight = Sight(stale_after_us=stale_after_us, blind_after_us=blind_after_us)
        self.ledger = Ledger()
        self.ceiling = Ceiling(live.admission.kv_ceiling_percent, live.admission.preemptions_per_minute)
        self.pricing = Pricing()
        self.ledger.expect = self.pricing.outputs.expected
        self.learned = Learned(live.slo)
        self.limits: Limits | None = None
        self._concurrency = RecentMost()
        self._let_in = False
        """Since the last state."""
        self._step_left_us = 0
        """Of the step in flight, when the state was taken."""
        self._queue_told_tokens = 0
        """Prefill that was left then."""

    def configure(self, live: LiveConfig) -> None:
        """Another promise or other ceilings; what was learned stays."""
        self._live = live
        self.ceiling.configure(live.admission.kv_ceiling_percent, live.admission.preemptions_per_minute)
        self.learned.configure(live.slo)
        if self.limits is not None:
            self.limits = self.limits.under(live)

    # What happens.

    def observe(self, state: EngineState, as_of_us: int, now_us: int) -> None:
        """Take in the engine's state, true as of `as_of_us`."""
        if self.sight.looked(now_us):
            self.ledger.renew(now_us)
        # One that stands still says nothing of who came and went since: taken in again it would bring back who left.
        if self.sight.knows(state, as_of_us):
            return
        limits = Limits.from_state(state, self._live)
        if limits is None:
            self.sight.missed()
            return
        self.limits = limits
        elapsed_us = self.sight.saw(state, as_of_us, now_us)
        bias = self.pricing.outputs.bias
        bias.suspect(self.ledger.outgrown())
        for entry in self.ledger.apply(state, limits, now_us, length_bias=bias.factor):
            self.pricing.learn_prompt(entry.cost, entry.choices[0].prompt_tokens)
        self.pricing.observe(state, now_us)
        self._step_left_us = max(0, state.step_predicted_us - state.step_running_us) if state.step_running_us else 0
        self._queue_told_tokens = self.ledger.inside.queue_tokens
        self.learned.moved(self.ledger, limits, elapsed_us, now_us)
        self.ceiling.observe(state.boot_id, state.preemptions_total, now_us, let_in=self._let_in)
        self._let_in = False
        self._remember_concurrency(now_us)

    def reserve(self, request_id: str, cost: Cost, look: Look, now_us: int) -> Permit:
        """Take the room for a call that was looked at just now."""
        permit = self.ledger.reserve(request_id, cost, now_us)
        self._let_in = True
        self.pricing.admitted(request_id, cost)
        if look.unbiased_ttft_us is not None:
            due_us = None if look.promised_ttft_us is None else now_us + look.promised_ttft_us - look.waited_us
            self.learned.predicted(request_id, look.unbiased_ttft_us, due_us)
        self._remember_concurrency(now_us)
        return permit

    def first_token(self, permit: Permit, now_us: int) -> None:
        """An admitted request's first token went out: learn how far the prediction was off."""
        self.learned.first_token(permit.entry, now_us)

    def missed(self, now_us: int) -> None:
        """The engine refused what was let in: its queue is longer than was predicted."""
        self.learned.bias.miss(now_us)

    def told(self, permit: Permit, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """An answer came to its end, and said how long it and its prompts were, where it did."""
        permit.told(prompt_tokens, output_tokens)
        if not self.ledger.lists_requests:
            self.pricing.told(permit.entry.id, prompt_tokens, output_tokens)

    def released(self, entry: Entry, now_us: int, *, completed: bool) -> None:
        """A call has left: learn how long such a stay is."""
        self.learned.left(entry, now_us, completed=completed)
        self.pricing.left(entry, now_us, listed=self.ledger.lists_requests, completed=completed)

    # How far it can be trusted.

    def freshness(self, now_us: int) -> Freshness:
        """How far the engine's state can be trusted."""
        return self.sight.freshness(now_us)

    def state_age_us(self, now_us: int) -> int | None:
        """Age of the state in use."""
        return self.sight.age_us(now_us)

    def sequences(self, now_us: int) -> int:
        """Choices that may run at once, given how fresh the engine's state is."""
        if self.limits is None:
            return 1
        freshness = self.freshness(now_us)
        if freshness == "fresh":
            return self.limits.max_sequences
        if freshness == "stale":
            return max(1, int(self.limits.max_sequences * STALE_FACTOR))
        return max(1, self._concurrency.most // 2)

    def slots_for(self, percent: int, now_us: int) -> int:
        """Choices that may run at once where a class may take so much of them: rounded up, at least one."""
        return max(1, -(-self.sequences(now_us) * percent // 100))

    def ceiling_blocks(self, now_us: int, percent: int = 100) -> int:
        """Blocks that the future peak may reach, for a class that may take so much of them."""
        if self.limits is None:
            return 0
        share = self.ceiling.share * (1.0 if self.freshness(now_us) == "fresh" else STALE_FACTOR)
        return int(self.limits.total_blocks * share) * percent // 100

    # What is inside, and will be.

    def inside(self, now_us: int) -> int:
        """Choices that hold, or will hold, a slot."""
        return self._inside(now_us).choices

    def ledger_blocks(self) -> int:
        """Blocks that what was let in holds now, all known input counted."""
        return self.ledger.inside.blocks

    def peak_blocks(self, now_us: int, cost: Cost | None = None) -> int:
        """The future peak, with one more call or without."""
        asking = () if cost is None else tuple(map(progress_of, cost.choices))
        return self._inside(now_us).peak_blocks(asking)

    def predicted_ttft_us(self, limits: Limits, cost: Cost, now_us: int) -> int:
        """Time to the first token of a call that enters now, before the bias."""
        inside = self._inside(now_us)
        # Everybody ahead decodes by the time this one prefills.
        decodes, queue_tokens = inside.choices, inside.queue_tokens
        own_pairs = 0
        if limits.per_prior_pair_ps:
            for choice in cost.choices:
                uncached_tokens = choice.prompt_tokens - choice.cached_tokens
                own_pairs += limits.prior_pairs(choice.cached_tokens, uncached_tokens, decodes)
        own_us = limits.prefill_us(
            0, cost.prefill_tokens, decodes, own_requests=len(cost.choices), prior_pairs=own_pairs
        )
        queue_us = 0
        if queue_tokens:
            together_us = limits.prefill_us(
                queue_tokens, cost.prefill_tokens, decodes, own_requests=len(cost.choices),
                prior_pairs=inside.prior_pairs + own_pairs,
            )  # fmt: skip
            queue_us = max(0, together_us - own_us)
        return own_us + max(0, self._step_left_us + queue_us - self._done_us(queue_tokens, queue_us, now_us))

    def queue_us(self, limits: Limits, cost: Cost, now_us: int) -> int:
        """How long a call that enters now waits for the prefill of others, before the bias."""
        inside = self._inside(now_us).choices
        own_us = limits.prefill_us(0, cost.prefill_tokens, inside, own_requests=len(cost.choices))
        return max(0, self.predicted_ttft_us(limits, cost, now_us) - own_us)

    def _done_us(self, queue_tokens: int, queue_us: int, now_us: int) -> int:
        """What the engine will have done since its state was taken of the work that was told then."""
        age_us = self.sight.age_us(now_us)
        if age_us is None or self.freshness(now_us) == "blind":
            return 0
        told_us = queue_us * min(queue_tokens, self._queue_told_tokens) // max(1, queue_tokens)
        return min(int(age_us / self.learned.bias.factor(now_us)), self._step_left_us + told_us)

    def stay_us(self, now_us: int) -> int | None:
        """How long a request stays; None while no stay was measured."""
        mean_us = self.learned.residence.mean_us
        # Those inside may be slower than those that left: they have stayed this long already.
        return None if mean_us is None else max(mean_us, self.ledger.mean_age_us(now_us))

    def time_for(self, needed: int, inside: int, now_us: int) -> int | None:
        """Time until `needed` of the `inside` are free again, at the rate at which requests leave now."""
        stay_us = self.stay_us(now_us)
        return None if stay_us is None or not inside else needed * stay_us // inside

    def _time_to_room_us(self, limits: Limits, cost: Cost, excess: int, ceiling: int, now_us: int) -> int | None:
        """Time until the future peak would have room for a call; None while no stay was measured.

        At the rate at which blocks are released it comes too early: those that stay go on growing. Where each stays as
        long as is expected of it, as if nobody were shorter, it comes too late. The geometric mean of both is told.
        """
        soon_us = self.time_for(excess, self.ledger_blocks(), now_us)
        if soon_us is None:
            return None
        inside = self._inside(now_us)
        steps = inside.steps_until_room(tuple(map(progress_of, cost.choices)), ceiling)
        step_us = limits.decode_step_us(inside.choices) * self.learned.pace.factor(now_us)
        late_us = steps * step_us * MEAN_OF_EXPECTED
        return int(math.sqrt(soon_us * max(soon_us, late_us)))

    # Whether one more fits, cheap tests first.

    def look(self, cost: Cost, now_us: int, waited_us: int, *, ceiling_percent: int = 100) -> Look:
        """Whether a call has room now, and what was seen. An idle engine takes any one that fits at all.

        `waited_us` of the promise of a first token have gone by already. `ceiling_percent` is what its class may take
        of the slots and of the ceiling.
        """
        limits = self.limits
        assert limits is not None, "an engine is available only once it has told its limits"
        inside = self._inside(now_us)
        look = Look(inside.choices, waited_us=waited_us)
        if not inside.choices:
            self._predict(look, limits, cost, now_us)
            return look
        look.sequences = self.slots_for(ceiling_percent, now_us)
        if (excess := inside.choices + len(cost.choices) - look.sequences) > 0:
            wait_us = self.time_for(excess, inside.choices, now_us)
            look.held = Held(Reason.SLOTS, f"{inside.choices} of {look.sequences} slots are taken", wait_us)
            return look
        ceiling = look.ceiling_blocks = self.ceiling_blocks(now_us, ceiling_percent)
        peak = look.peak_blocks = self.peak_blocks(now_us, cost)
        if peak > ceiling:
            wait_us = self._time_to_room_us(limits, cost, peak - ceiling, ceiling, now_us)
            problem = f"with this request the KV cache would come to hold {peak} blocks, and {ceiling} may be used"
            look.held = Held(Reason.KV_PEAK, problem, wait_us)
            return look
        predicted_us, promise_us = self._predict(look, limits, cost, now_us)
        total_us, share = waited_us + predicted_us, self.learned.punctuality.share
        excess_us = total_us - int(promise_us * share)
        if excess_us <= 0 or self._live.slo.enforcement == "Observe":
            return look
        problem = f"the first token is predicted after {total_us / 1e6:.1f} s, and {promise_us / 1e6:.1f} s is promised"
        if share < 1:
            problem += f", of which {100 * share:.0f} % is given away while first tokens come late"
        # A queue of prefill drains by itself; decodes that slow the prefill have to leave.
        wait_us = excess_us if inside.prefilling else self.time_for(1, inside.choices, now_us)
        look.held = Held(Reason.TTFT_PROMISE, problem, wait_us)
        return look

    def _predict(self, look: Look, limits: Limits, cost: Cost, now_us: int) -> tuple[int, int]:
        """Time to the first token, the bias included, and the promise; noted in `look`."""
        look.unbiased_ttft_us = self.predicted_ttft_us(limits, cost, now_us)
        predicted_us = int(look.unbiased_ttft_us * self.learned.bias.factor(now_us))
        promise_us = self._live.slo.ttft_promise_us(cost.longest_prompt_tokens)
        look.predicted_ttft_us, look.promised_ttft_us = predicted_us, promise_us
        gaps = max(choice.output_tokens for choice in cost.choices) - 1
        gap_us = limits.decode_step_us(look.inside + len(cost.choices)) * self.learned.pace.factor(now_us)
        look.predicted_finish_us = predicted_us + int(gaps * gap_us)
        return predicted_us, promise_us

    def slack_us(self, cost: Cost, now_us: int) -> int:
        """What the promise of a first token leaves to wait; negative when nothing."""
        assert self.limits is not None, "asked only where something was held"
        predicted_us = int(self.predicted_ttft_us(self.limits, cost, now_us) * self.learned.bias.factor(now_us))
        promise_us = self._live.slo.ttft_promise_us(cost.longest_prompt_tokens)
        return int(promise_us * self.learned.punctuality.share) - predicted_us

    def _inside(self, now_us: int) -> Inside:
        if self.ledger.strangers and self.freshness(now_us) == "blind":
            self.ledger.forget_strangers()
        return self.ledger.inside

    def _remember_concurrency(self, now_us: int) -> None:
        if self.freshness(now_us) == "fresh":
            self._concurrency.add(self.ledger.inside.choices, now_us)
