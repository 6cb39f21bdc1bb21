"""Who runs in the next step, with how many tokens, and who gives way. Knows no torch, no clock, no I/O.

There is no prefill phase and no decode phase: every request has a position up to which it is computed and a target, its
known tokens, and a step gives tokens to requests so that the one catches up with the other. Per step: running requests
that need one token come first (decode is reserved), then running requests with more to compute, inside the prefill
budget, then entry from the queue. Decodes advance in bulk, as rows of arrays; only what changed is touched one by one.

A step may be planned before the results of earlier ones came (`window`): a decode then follows a token in flight.
What is planned lives in the rows, what is settled in the requests. Start reading at `schedule`, then `update`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

import numpy as np

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.budgets import Budgets, Needs
from sluice_engine.core.derive import StepLimits
from sluice_engine.core.emissions import Emissions
from sluice_engine.core.fit import blocks_for, unfit_reason
from sluice_engine.core.order.policy import Policies, meter_for, order_for
from sluice_engine.core.order.service import Service
from sluice_engine.core.plan import (
    DecodeBatch,
    DrainReason,
    HeldBack,
    IdleReason,
    Preemption,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TableChange,
)
from sluice_engine.core.preemption import CLASS_LEVELS, choose_outranked, choose_victim, rank_for
from sluice_engine.core.prefix_cache import PrefixCache, PrefixHit
from sluice_engine.core.price import recompute_us
from sluice_engine.core.request import Outcome, Request, RequestStatus
from sluice_engine.core.rows import Rows
from sluice_engine.core.settlement import Settlement
from sluice_engine.core.step import Step
from sluice_engine.core.steptime import StepTimes
from sluice_engine.core.suspension import Suspension, SwapSpace
from sluice_engine.core.window import Window

# Waiting requests that are looked at beyond the first that cannot be placed: a few, so that a step's cost is bounded.
LOOK_PAST = 4
# A request that could not be placed is overtaken this often, then nobody passes it any more.
MAX_OVERTAKEN = 16
# Blocks given back behind a fence, or taken on optimism: more than this share of the pool and the window closes.
STRANDED_SHARE = 8

LASTING_NEEDS = Needs({"requests": 1})


class _DrainFirst(Exception):
    """A plan needs something that only settled steps can give."""

    def __init__(self, reason: DrainReason) -> None:
        super().__init__(reason)
        self.reason: DrainReason = reason


class Scheduler:
    """Continuous batching: the batch is formed anew in every step."""

    def __init__(  # noqa: PLR0913  # the parts it plans with, each with an owner of its own
        self,
        limits: StepLimits,
        pool: BlockPool,
        times: StepTimes,
        *,
        max_length_tokens: int,
        policies: Policies | None = None,
        prefix: PrefixCache | None = None,
        space: SwapSpace | None = None,
        depth: int = 0,
        num_slots: int | None = None,
    ) -> None:
        """`limits` may be replaced between steps; `num_slots`: the most requests that they may ever let run.

        `policies`: who goes first, who gives way; the program's own defaults without.

        `prefix`: what requests may share; nothing without. `space`: where preempted ones keep their state; without it,
        it is computed again.

        `depth`: steps that may be in flight while the next is planned.
        """
        self.limits = limits
        self.pool = pool
        self.times = times
        self.max_length_tokens = max_length_tokens
        self.policies = policies if policies is not None else Policies()
        self.prefix = prefix or PrefixCache(pool, enabled=False)
        self.suspension = Suspension(
            space,
            pool.block_tokens,
            resume=self.policies.resume,
            recompute_us=self._recompute_us,
            lose=self._lose_progress,
        )
        self.depth = depth
        self.requests: dict[str, Request] = {}
        """All that have not ended, by id."""
        service = self._service()
        self.waiting = order_for(self.policies, service)
        self._rank = rank_for(
            self.policies.victim,
            price_us=lambda request: self.suspension.price(request).us,
            freed_blocks=lambda request: pool.freed_by(request.blocks),
            latest_us=service.latest_start_us,
        )
        self._meter = meter_for(self.policies, self.waiting)
        """None where nothing is shared out by what was used."""
        self.rows = Rows(num_slots if num_slots is not None else limits.max_sequences)
        self.window = Window()
        self.step = 0
        """Steps planned so far: the number of the last one."""
        self.preemptions_total = 0
        self.recomputed_tokens_total = 0
        self._held = Budgets({"requests": self.rows.num_slots})
        self._prefilling: list[Request] = []
        """Running requests with more to compute than one token, by first arrival."""
        self._table_changes: list[TableChange] = []
        """For the runner, with the next plan that runs."""
        self._optimistic_blocks = 0
        self._levels: Counter[int] = Counter()
        """Running requests by priority."""
        self._now_us = 0
        """The latest time that anybody told."""
        self._latched_for: int | None = None
        """Blocks that a victim needs to come back; entry is shut while this is set."""
        self._settlement = Settlement(self.rows, self.window, pool, self.prefix, self.suspension, self.end)

    def _service(self) -> Service:
        """What a request still costs, for orders and expiry."""
        per_step = self.limits.prefill_budget(0, 0)
        if self.limits.max_prefill_tokens_per_request is not None:
            per_step = min(per_step, self.limits.max_prefill_tokens_per_request)
        return Service(
            lambda decodes, prefill: self.times.predict_us(decodes, prefill, 0),
            max(1, per_step),
            cached_tokens=lambda request: self.prefix.match(request).num_tokens,
        )

    @property
    def running(self) -> list[Request]:
        """Who runs, by first arrival. It walks all slots: not for every step."""
        return self.rows.running()

    @property
    def stale_results_total(self) -> int:
        """Results that came for a request that had ended or was preempted meanwhile, or for no step in flight."""
        return self._settlement.stale_results_total

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any step is in flight."""
        return bool(self.requests) or len(self.window) > 0

    def add(self, request: Request) -> str | None:
        """Queue a request by its arrival; a sentence when it can never fit, and then nothing is queued."""
        assert request.id not in self.requests, f"request {request.id} exists"
        reason = unfit_reason(
            request.num_prompt,
            request.sampling.max_tokens,
            max_length_tokens=self.max_length_tokens,
            pool_tokens=self.pool.num_tokens,
        )
        if reason is None:
            self.requests[request.id] = request
            self._settlement.watch(request)
            self.waiting.push(request)
        return reason

    def end(self, request_id: str, outcome: Outcome, error: str | None = None) -> Request | None:
        """End a request in whatever state it is and free what it holds; None when it had ended already.

        What steps in flight may still write is handed out again only once they are settled.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._leave(request, sound=outcome is not Outcome.FAILED)
        self.suspension.drop(request)
        request.status = RequestStatus.FINISHED
        request.outcome, request.error = outcome, error
        self.waiting.remove(request)
        self._latched_for = None  # whoever leaves reopens the entry
        return request

    def schedule(self, now_us: int) -> StepPlan:
        """The batch of the next step. What it takes is taken now; `update` settles it."""
        self._now_us = now_us
        expired = tuple(request for late in self.waiting.expired(now_us) if (request := self._expire(late)))
        step = Step({"tokens": self.limits.token_budget})
        free_before = self.pool.num_free
        try:
            self._schedule_decodes(step)
            step.budgets.limit("prefill_tokens", self.limits.prefill_budget(len(step.decodes), step.context))
            self._schedule_prefills(step)
            self._make_way(step, now_us)
        except _DrainFirst as drain:
            return StepPlan(self.step, expired=expired, drain_reason=drain.reason)
        self._schedule_entry(step, now_us)
        self._share_out_the_rest(step)
        return self._seal(step, expired, free_before)

    def must_drain_first(self) -> DrainReason | None:
        """Why the steps in flight must be settled before another can be planned; None when they need not.

        One more reason shows only while planning: a preemption, since a victim must not be in flight.
        """
        if not len(self.window):
            return None
        if len(self.window) > self.depth:
            return "window_full"
        if self.rows.decodes().penalised:
            return "host_tokens"
        if (self.pool.num_fenced + self.window.optimistic_blocks) * STRANDED_SHARE > self.pool.num_blocks:
            return "stranded_blocks"
        return None

    def update(self, result: StepResult, now_us: int) -> Emissions:
        """Settle a step, and those after it whose results came earlier: what their callers are told."""
        self._now_us = now_us
        return self._settlement.take(result, now_us)

    def ran(self, plan: StepPlan, real_us: int) -> None:
        """A step took so long on the device; told before its result is settled, since that may end its requests."""
        if self._meter is None:
            return
        decodes = len(plan.decodes)
        alone_us = self.times.predict_us(decodes, 0, plan.context_tokens) if decodes and plan.chunks else 0
        chunks = ((chunk.request, chunk.num_tokens, chunk.samples) for chunk in plan.chunks)
        self._meter.ran(real_us, decodes, alone_us / max(1, plan.predicted_us, alone_us), chunks)

    def stuck(self, plan: StepPlan) -> list[Request]:
        """Requests that an empty plan leaves without any way on: they run alone and cannot grow.

        Entry checks that a request fits the pool alone, so this is a fault of ours; it ends in an error, not in a loop.
        """
        if not plan.is_empty or plan.preempted or plan.drain_reason or len(self.window):
            return []
        return self.running

    # Planning, in the order of a step.

    def _schedule_decodes(self, step: Step) -> None:
        """All decodes in bulk, once those that cannot go on by themselves have been seen to, oldest first."""
        reason = self.must_drain_first()
        if reason is not None:
            raise _DrainFirst(reason)
        rows = self.rows
        stalled: set[int] = set()
        while True:
            batch = self._decodes_within(step.budgets.left("tokens"), stalled)
            starts = rows.start[batch.slots]
            due = np.flatnonzero(starts >= rows.until[batch.slots])
            if not len(due):
                step.set_decodes(batch, starts)
                return
            for request in sorted(batch.requests[due], key=_arrival):
                # A victim of an older one has no slot any more.
                if request.slot >= 0 and not self._carry_on(request, step) and request.slot >= 0:
                    stalled.add(request.slot)

    def _decodes_within(self, budget: int, stalled: set[int]) -> DecodeBatch:
        """Who decodes, but for those that cannot get a block; the oldest when the budget does not suffice."""
        batch = self.rows.decodes()
        if stalled:
            batch = batch.part(np.flatnonzero(~np.isin(batch.slots, list(stalled))))
        if len(batch) > budget:
            arrivals = np.array([request.arrival_us for request in batch.requests])
            batch = batch.part(np.sort(np.argsort(arrivals, kind="stable")[:budget]))
        return batch

    def _carry_on(self, request: Request, step: Step) -> bool:
        """See to a decode that is at the end of its blocks or of its length; False when it cannot run in this step."""
        slot = request.slot
        start = int(self.rows.start[slot])
        if start >= request.peak_tokens:
            self.rows.stop_decoding(slot)  # its last token is in flight: one more step would be of no use
        elif self._grow(request, start + 1, step):
            self.rows.until[slot] = self._until(request)
        else:
            return False
        return True

    def _schedule_prefills(self, step: Step) -> None:
        """Chunks of running requests, oldest first; a long prompt leaves half of the budget to those behind it."""
        wanted = self.waiting.waiting_tokens + sum(map(self._uncomputed, self._prefilling))
        for request in self._prefilling:
            wanted -= self._uncomputed(request)
            self._add_share(request, step, wanted_behind=wanted)

    def _make_way(self, step: Step, now_us: int) -> None:
        """Let the first in line in at the cost of lower classes, where the policy is that and nothing else will do."""
        if self.policies.order != "Priority" or step.preempted:
            return
        first = next(self.waiting.candidates(now_us), None)
        if first is None or min(step.budgets.left("tokens"), step.budgets.left("prefill_tokens")) <= 0:
            return
        if max((level for level, count in self._levels.items() if count), default=0) - first.priority < CLASS_LEVELS:
            return
        missing = self._missing_blocks(first, self.prefix.match(first))
        if missing <= 0 and self._held.lacking(LASTING_NEEDS) is None:
            return

        def enough(victims: list[Request]) -> bool:
            return sum(self.pool.freed_by(victim.blocks) for victim in victims) >= missing

        victims = choose_outranked(
            self.running,
            first,
            self._rank,
            max_preemptions=self.policies.max_preemptions_per_request,
            enough=enough,
        )
        if not victims:
            return
        if len(self.window):
            raise _DrainFirst("preemption")
        for victim in victims:
            self._preempt(victim, first, step)
        self._try_entry(first, step, self.waiting.waiting_tokens - first.num_tokens, now_us)

    def _missing_blocks(self, request: Request, hit: PrefixHit) -> int:
        """Blocks that the pool lacks for a request to enter; not above zero when it has them."""
        own = blocks_for(request.num_tokens, self.pool.block_tokens) - hit.num_blocks
        return own + hit.num_unused - self.pool.num_free

    def _schedule_entry(self, step: Step, now_us: int) -> None:
        """Let waiting requests in, past a few that cannot be placed, and note why those stay out."""
        passed: list[Request] = []
        wanted = self.waiting.waiting_tokens
        for request in self.waiting.candidates(now_us):
            gate = self._shut_gate(step)
            if gate is not None:
                step.gate = gate
                break
            wanted -= request.num_tokens
            reason = self._try_entry(request, step, wanted, now_us)
            if reason is None:
                for other in passed:
                    other.num_overtaken += 1
                continue
            passed.append(request)
            step.held_back.append(HeldBack(request.id, reason))
            if len(passed) > LOOK_PAST or request.num_overtaken >= MAX_OVERTAKEN:
                step.gate = "behind_others"
                break

    def _shut_gate(self, step: Step) -> IdleReason | None:
        """What keeps everybody out, whoever comes."""
        if step.preempted:
            return "entry_latched"
        if self._latched_for is not None:
            if self.pool.num_free < self._latched_for + self.rows.num_running:
                return "entry_latched"
            self._latched_for = None
        if self.rows.num_running >= self.limits.max_sequences or self._held.lacking(LASTING_NEEDS):
            return "no_free_slots"
        if min(step.budgets.left("tokens"), step.budgets.left("prefill_tokens")) <= 0:
            return "budget_exhausted"
        return None

    def _try_entry(self, request: Request, step: Step, wanted_behind: int, now_us: int) -> IdleReason | None:
        """Let one request in, or say what it lacks.

        Entry fits the whole known input or does not happen: looking at the first chunk only makes long prompts evict
        each other.
        """
        hit = self.prefix.match(request)
        if self._missing_blocks(request, hit) > 0:
            return "no_free_blocks"
        start = max(request.num_computed, hit.num_tokens)
        share = self._prefill_share(request, start, step, wanted_behind)
        if share <= 0:
            return "budget_exhausted"
        self.prefix.take(request, hit)
        granted = self.pool.grow(request.blocks, request.num_tokens)
        assert granted, "entry was checked"
        self.suspension.resume(request, found_blocks=hit.num_blocks, step=self.step + 1, now_us=now_us)
        self.waiting.remove(request)
        self.waiting.charge(request, starts=1)
        if self._meter is not None:
            self._meter.entered(request, now_us)
        self._held.take(request, LASTING_NEEDS)
        self.rows.enter(request)
        self._levels[request.priority] += 1
        self._table_changes.append(TableChange(request.slot, 0, tuple(request.blocks)))
        request.status = RequestStatus.RUNNING
        request.num_overtaken = 0
        if request.num_preemptions:
            # Not a victim again before all of it is computed again and a new token has come of it.
            request.protected_until = request.num_tokens
        if request.scheduled_us < 0:
            request.scheduled_us = now_us
        insort(self._prefilling, request, key=_arrival)
        step.add_chunk(request, request.num_computed, share)
        return None

    def _share_out_the_rest(self, step: Step) -> None:
        """Prefill budget that was kept for others and not used goes to those that still want it, oldest first."""
        for request in self._prefilling:
            if step.budgets.left("prefill_tokens") <= 0:
                return
            self._add_share(request, step, wanted_behind=0)

    def _add_share(self, request: Request, step: Step, *, wanted_behind: int) -> None:
        start = int(self.rows.start[request.slot])
        num_tokens = self._prefill_share(request, start, step, wanted_behind)
        if num_tokens > 0:
            step.add_chunk(request, start, num_tokens)

    def _prefill_share(self, request: Request, start: int, step: Step, wanted_behind: int) -> int:
        """Tokens of a request from `start` on that still fit, where those behind it want some: half is theirs."""
        left = step.budgets.left("prefill_tokens")
        left -= min(left // 2, max(0, wanted_behind))
        has = step.chunks.get(request, (0, 0))[1]
        share = min(request.num_tokens - start - has, step.budgets.left("tokens"), left)
        cap = self.limits.max_prefill_tokens_per_request
        if cap is not None:
            share = min(share, cap - has)
        if share > 0 and (start or step.chunks):
            # The budget was made for the start of a prompt: a chunk that lies deeper costs more.
            decodes, prefill, pairs = len(step.decodes), step.prefill, step.prior_pairs
            share = min(share, self.limits.chunk_share(decodes, step.context, start, prefill, pairs))
        return share

    def _uncomputed(self, request: Request) -> int:
        return request.num_tokens - int(self.rows.start[request.slot])

    def _seal(self, step: Step, expired: tuple[Request, ...], free_before: int) -> StepPlan:
        """The plan as it stands; from now on its requests are that far."""
        step.budgets.check()
        rows, batch = self.rows, step.decodes
        rows.start[batch.slots] = step.starts + 1
        chunks = tuple(self._seal_chunk(request, *share) for request, share in step.chunks.items())
        runs = bool(len(batch) or chunks)
        self.step += runs
        swap_out, swap_in = self.suspension.take_copies(self.step) if runs else ((), ())
        waiting = _count_reasons(step, len(self.waiting))
        plan = StepPlan(
            step=self.step,
            decodes=batch,
            decode_starts=step.starts,
            chunks=chunks,
            prefill_tokens=step.prefill,
            context_tokens=step.context,
            prior_pairs=step.prior_pairs,
            table_changes=tuple(self._table_changes) if runs else (),
            preempted=tuple(step.preempted),
            swap_out=swap_out,
            swap_in=swap_in,
            expired=expired,
            idle_reason=None if runs else self._idle_reason(waiting),
            waiting_reasons=waiting,
            held_back=tuple(step.held_back),
            optimistic_blocks=self._optimistic_blocks if runs else 0,
            predicted_us=self._predict_us(step) + self.suspension.copies_us(swap_out, swap_in) if runs else 0,
            tokens_left=step.budgets.left("tokens"),
            prefill_left=step.budgets.left("prefill_tokens"),
            free_blocks_before=free_before,
            free_blocks_after=self.pool.num_free,
        )
        if runs:
            self._table_changes.clear()
            self._optimistic_blocks = 0
            self.window.push(plan)
        return plan

    def _seal_chunk(self, request: Request, start: int, num_tokens: int) -> ScheduledRequest:
        slot, end = request.slot, start + num_tokens
        self.rows.start[slot] = end
        samples = end == request.num_tokens
        if samples:
            self._prefilling.remove(request)
            if end < request.peak_tokens:
                self.rows.start_decoding(slot, self._until(request))
        return ScheduledRequest(request, request.incarnation, slot, start, num_tokens, samples)

    def _predict_us(self, step: Step) -> int:
        return self.times.predict_us(len(step.decodes), step.prefill, step.context, step.prior_pairs)

    def _idle_reason(self, waiting: tuple[tuple[IdleReason, int], ...]) -> IdleReason:
        if waiting:
            return waiting[0][0]
        return "in_flight" if len(self.window) else "no_requests"

    # Blocks: who gets them, who gives way.

    def _until(self, request: Request) -> int:
        """Position up to which a decode needs nobody."""
        return min(len(request.blocks) * self.pool.block_tokens, request.peak_tokens)

    def _grow(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Hold blocks for `num_tokens`, preempting if it must; False when the request cannot run in this step."""
        self.prefix.settle(request, request.num_computed)
        if self._meter is not None:
            self._meter.charge(request, self._now_us)
        first = len(request.blocks)
        while not self.pool.grow(request.blocks, num_tokens):
            if len(self.window):
                raise _DrainFirst("preemption")
            victim = choose_victim(
                self.running, request, self._rank, max_preemptions=self.policies.max_preemptions_per_request
            )
            if victim is None:
                return False
            self._preempt(victim, request, step)
            if victim is request:
                return False
        if self._meter is not None:
            self._meter.grew(request)
        blocks = tuple(request.blocks[first:])
        self._table_changes.append(TableChange(request.slot, first, blocks))
        if len(self.window):
            self._optimistic_blocks += len(blocks)
        return True

    def _preempt(self, victim: Request, needing: Request, step: Step) -> None:
        step.take_back(victim)
        price = self.suspension.suspend(victim, self._now_us)
        num_computed, free_before = victim.num_computed, self.pool.num_free
        self._leave(victim)
        step.preempted.append(
            Preemption(
                request_id=victim.id,
                num_computed=num_computed,
                freed_blocks=self.pool.num_free - free_before,
                recompute_us=price.recompute_us,
                beneficiary_id=needing.id,
                swap_us=price.swap_us,
                choice=price.choice,
                reason=price.reason,
            )
        )
        self.preemptions_total += 1
        self._latched_for = blocks_for(victim.num_tokens, self.pool.block_tokens)
        if price.choice == "swap":
            victim.num_computed = num_computed  # what is left of its input is a chunk, as for all who enter
        else:
            self.recomputed_tokens_total += num_computed
            victim.num_computed = 0
        victim.incarnation += 1
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.push(victim)

    def _recompute_us(self, victim: Request) -> int:
        """What its state costs to compute again beside the others that run."""
        beside = max(1, self.rows.num_running - 1)
        chunk = max(1, self.limits.prefill_budget(beside, 0))
        return recompute_us(
            victim.num_computed, self.times, chunk_tokens=chunk, decode_requests=beside, context_tokens=0
        )

    def _lose_progress(self, request: Request) -> None:
        """What a waiting request kept is gone: it begins again."""
        self.waiting.remove(request)
        self.recomputed_tokens_total += request.num_computed
        request.num_computed = 0
        self.waiting.push(request)

    def _leave(self, request: Request, *, sound: bool = True) -> None:
        """Take a running request out of the batch, with all that it holds; what is not sound is not kept for others."""
        if self._meter is not None:
            self._meter.left(request, self._now_us)
        if sound:
            self.prefix.settle(request, request.num_computed)
        else:
            self.prefix.forget(request)
        self.pool.release(request.blocks, fence=self.window.newest_step)
        request.num_settled_blocks = 0
        self.rows.leave(request)
        self._levels[request.priority] -= 1
        self._held.take_back(request)
        if request in self._prefilling:
            self._prefilling.remove(request)

    def _expire(self, request: Request) -> Request | None:
        return self.end(request.id, Outcome.EXPIRED)


def _arrival(request: Request) -> int:
    return request.arrival_us


def _count_reasons(step: Step, num_waiting: int) -> tuple[tuple[IdleReason, int], ...]:
    """Waiting requests by the gate that holds them; those not looked at are held by what stopped the looking."""
    counts: dict[IdleReason, int] = {}
    for held in step.held_back:
        counts[held.reason] = counts.get(held.reason, 0) + 1
    rest = num_waiting - len(step.held_back)
    if rest and step.gate is not None:
        counts[step.gate] = counts.get(step.gate, 0) + rest
    return tuple(counts.items())
