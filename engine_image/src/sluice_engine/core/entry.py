"""Who of the waiting requests enters, and why the others stay out.

A request that cannot be placed does not block those behind it: a few are looked past, and after it was overtaken a
number of times nobody passes it any more. Entry fits the whole known input or does not happen: looking at the first
chunk only makes long prompts evict each other. Start reading at `schedule`.
"""

from __future__ import annotations

from sluice_engine.core.ladder import Ladder
from sluice_engine.core.order.waiting import Waiting
from sluice_engine.core.plan import HeldBack, IdleReason
from sluice_engine.core.prefix_cache import PrefixHit
from sluice_engine.core.request import Request, RequestStatus
from sluice_engine.core.running import Running
from sluice_engine.core.shares import Shares
from sluice_engine.core.step import Contain, Step
from sluice_engine.core.suspension import Suspension

# Waiting requests that are looked at beyond the first that cannot be placed: a few, so that a step's cost is bounded.
LOOK_PAST = 4
# Those that wait for an adapter cost a look each, and no search for blocks: many of them shall not hide who waits for
# none.
LOOK_PAST_ADAPTERS = 64
# A request that could not be placed is overtaken this often, then nobody passes it any more.
MAX_OVERTAKEN = 16


class Entry:
    """The door of the batch."""

    def __init__(
        self,
        running: Running,
        waiting: Waiting,
        ladder: Ladder,
        shares: Shares,
        suspension: Suspension,
        contain: Contain,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._ladder = ladder
        self._shares = shares
        self._suspension = suspension
        self._contain = contain

    def make_way(self, step: Step) -> None:
        """Let the first in line in at the cost of lower classes, where nothing else will do.

        Raises:
            DrainFirst: they may be in flight.
        """
        if step.preempted or not step.takes_prefill():
            return
        first = next(self._waiting.candidates(step.now_us), None)
        if first is None or not self._ladder.outranks_any(first):
            return
        match = self._running.prefix.match
        hit = match(first)
        if self._awaits_leader(first, hit):
            return
        victims = self._ladder.outranked(first, hit, step)
        for victim in victims:
            self._ladder.preempt(victim, first, step)
        if victims:
            # What they gave back may be what it finds.
            self._place(first, match(first), step, self._waiting.waiting_tokens - first.num_tokens)

    def schedule(self, step: Step) -> None:
        """Let waiting requests in, past a few that cannot be placed, and note why those stay out."""
        passed: list[Request] = []
        unadapted: list[Request] = []
        adapters_shut = False
        wanted = self._waiting.waiting_tokens
        for request in self._waiting.candidates(step.now_us):
            step.gate = self._shut_gate(step)
            if step.gate is not None:
                return
            wanted -= request.num_tokens
            if request.adapter and (adapters_shut or self._running.lacking(request, step.limits) == "adapters"):
                # Whoever brings no adapter does not prolong the wait: only others with one are held behind it.
                step.held_back.append(HeldBack(request.id, "adapters_in_use"))
                unadapted.append(request)
                adapters_shut |= request.num_overtaken >= MAX_OVERTAKEN
                if len(unadapted) > LOOK_PAST_ADAPTERS:
                    step.gate = "behind_others"
                    return
                continue
            try:
                hit = self._running.prefix.match(request)
                awaits = self._awaits_leader(request, hit)
                reason = "shared_prompt" if awaits else self._place(request, hit, step, wanted)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request
                self._contain(request, error, step)
                continue
            if reason is None:
                for other in (*passed, *unadapted) if request.adapter else passed:
                    other.num_overtaken += 1
                continue
            step.held_back.append(HeldBack(request.id, reason))
            if reason == "shared_prompt":
                continue  # it is on its way as its leader is: nobody overtakes it, and nobody waits behind it
            passed.append(request)
            if len(passed) > LOOK_PAST or request.num_overtaken >= MAX_OVERTAKEN:
                step.gate = "behind_others"
                return

    def _shut_gate(self, step: Step) -> IdleReason | None:
        """What keeps everybody out, whoever comes."""
        # In a step that preempted nobody enters but the request that it was for.
        if step.preempted or self._ladder.is_latched():
            return "entry_latched"
        if self._running.is_full(step.limits):
            return "no_free_slots"
        return None if step.takes_prefill() else "budget_exhausted"

    def _awaits_leader(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the blocks of its prompt are being computed right now, by another choice of the same call."""
        leader = request.leader
        if leader is None or leader.status is not RequestStatus.RUNNING or leader.is_decoding:
            return False
        return not request.num_preemptions and self._running.prefix.may_find_more(request, hit)

    def _place(self, request: Request, hit: PrefixHit, step: Step, wanted_behind: int) -> IdleReason | None:
        """Let one request in, with what it finds computed, or say what it lacks."""
        running = self._running
        if running.missing_blocks(request, hit) > 0:
            return "no_free_blocks"
        lacking = running.lacking(request, step.limits)
        if lacking is not None:
            return "no_free_slots" if lacking == "requests" else "adapters_in_use"
        start = max(request.num_computed, hit.num_tokens)
        share = self._shares.of(request, start, step, wanted_behind=wanted_behind)
        if share <= 0:
            return "budget_exhausted"
        self._waiting.remove(request)
        self._waiting.charge(request, starts=1)
        running.enter(request, hit)
        self._suspension.resume(request, found_blocks=hit.num_blocks, step=step.number, now_us=step.now_us)
        step.add_chunk(request, request.num_computed, share)
        return None
