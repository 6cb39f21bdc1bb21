"""Who runs in the next step, with how many tokens, and who gives way. Knows no torch, no clock, no I/O.

There is no prefill phase and no decode phase: every request has a position up to which it is computed and a target, its
known tokens, and a step gives tokens to requests so that the one catches up with the other. Per step: running requests
that need one token come first (decode is reserved), then running requests with more to compute, inside the prefill
budget, then entry from the queue. Decodes advance in bulk, as rows of arrays; only what changed is touched one by one.

A step may be planned before the results of earlier ones came (`window`): a decode then follows a token in flight.
What is planned lives in the rows, what is settled in the requests. Start reading at `schedule`, then `update`.

    running      who runs and what they hold: slots as arrays (`rows`), blocks (`blocks`, `prefix_cache`)
    decodes      those that compute one token each, in bulk
    ladder       who gives way when blocks run out, and what becomes of its state (`preemption`, `price`, `suspension`)
    drafts       guesses at what requests say next, where a step has room for them
    entry        who comes in, and why the others stay out (`order`)
    shares       how prefill is divided
    step         a plan in the making, with its budgets (`budgets`, `needs`)
    settlement   what a result means (`window`, `emissions`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.decodes import Decodes
from sluice_engine.core.drafts import Drafts
from sluice_engine.core.emissions import Emissions
from sluice_engine.core.entry import Entry
from sluice_engine.core.fit import unfit_reason
from sluice_engine.core.ladder import Ladder
from sluice_engine.core.needs import never_fitting
from sluice_engine.core.order.policy import Policies, meter_for, order_for, reorder
from sluice_engine.core.order.service import Service
from sluice_engine.core.plan import DrainReason, IdleReason, StepPlan, StepResult
from sluice_engine.core.preemption import rank_for
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.price import recompute_us
from sluice_engine.core.request import Outcome, Request, RequestStatus
from sluice_engine.core.rows import Rows
from sluice_engine.core.running import Running
from sluice_engine.core.settlement import Settlement
from sluice_engine.core.shares import Shares
from sluice_engine.core.step import Step
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import StepTimes
from sluice_engine.core.suspension import Suspension, SwapSpace
from sluice_engine.core.window import DrainFirst, Window

# Blocks given back behind a fence, or taken on optimism: more than this share of the pool and the window closes.
STRANDED_SHARE = 8


class Scheduler:
    """Continuous batching: the batch is formed anew in every step."""

    def __init__(  # noqa: PLR0913  # all parts of a step meet here
        self,
        limits: StepLimits,
        pool: BlockPool,
        times: StepTimes,
        *,
        max_length_tokens: int,
        policies: Policies | None = None,
        prefix: PrefixCache | None = None,
        space: SwapSpace | None = None,
        budgets: Mapping[str, int] | None = None,
        num_slots: int | None = None,
        depth: int = 0,
        most_drafts: int = 0,
        strict: bool = True,
    ) -> None:
        """`limits` may be replaced between steps; `num_slots`: the most requests that they may ever let run.

        `policies`: who goes first, who gives way; the program's own defaults without.

        `prefix`: what requests may share; nothing without. `space`: where preempted ones keep their state; without it,
        it is computed again. `budgets`: limits beyond tokens, requests and blocks, by name (`needs`).

        `depth`: steps that may be in flight while the next is planned. `most_drafts`: guesses of one request that a
        step may compute, 0 for none; the budget `draft_tokens` bounds those of all. `strict`: an impossible state
        raises; else it is counted, and fails the request that it is about.
        """
        self.limits = limits
        self.pool = pool
        self.times = times
        self.max_length_tokens = max_length_tokens
        self.policies = policies if policies is not None else Policies()
        self.prefix = prefix or PrefixCache(pool, enabled=False)
        self.depth = depth
        self.strict = strict
        self.requests: dict[str, Request] = {}
        """All that have not ended, by id."""
        self.step = 0
        """Steps planned so far: the number of the last one."""
        self.faults_total = 0
        """Impossible states that were contained; each is a defect of ours."""
        self.faults: deque[str] = deque(maxlen=64)
        """What they were, for the log of whoever runs this; the reader empties it."""
        self._service = service = Service(
            lambda decodes, prefill: self.times.predict_us(decodes, prefill, 0),
            _alone_tokens(limits),
            cached_tokens=lambda request: self.prefix.match(request).num_tokens,
        )
        self.waiting = order_for(self.policies, service)
        self.rows = Rows(num_slots if num_slots is not None else limits.max_sequences)
        self.budgets = {"draft_tokens": most_drafts * self.rows.num_slots, **(budgets or {})}
        self.window = Window()
        self.suspension = Suspension(
            space,
            pool.block_tokens,
            resume=self.policies.resume,
            recompute_us=self._recompute_us,
            lose=self._lose_progress,
        )
        self._meter = meter_for(self.policies, self.waiting)
        """None where nothing is shared out by what was used."""
        self._running = Running(self.rows, pool, self.prefix, self.window, self._meter, self.budgets, self._note_fault)
        rank = rank_for(
            self.policies.victim,
            price_us=lambda request: self.suspension.price(request).us,
            freed_blocks=lambda request: pool.freed_by(request.blocks),
            latest_us=service.latest_start_us,
        )
        self._ladder = Ladder(self._running, self.waiting, self.window, self.suspension, self.policies, rank)
        self._decodes = Decodes(self.rows, self._ladder, self._contain)
        self._shares = Shares(self._running, self.waiting)
        self._entry = Entry(self._running, self.waiting, self._ladder, self._shares, self.suspension, self._contain)
        self.drafts = Drafts(self._running, times, most_tokens=most_drafts) if most_drafts else None
        """None where nothing is guessed."""
        self._settlement = Settlement(
            self.rows, self.window, pool, self.prefix, self.suspension, self.end, self._note_fault, self.drafts
        )

    def configure(self, limits: StepLimits, policies: Policies) -> None:
        """Go by other limits, and by other numbers of the same policies, from the next step on.

        Whoever runs goes on, also where fewer may now: entry waits until enough have left. Whoever waits takes the
        place that the new numbers give it.
        """
        self.limits, self.policies = limits, policies
        self._service.prefill_step_tokens = _alone_tokens(limits)
        reorder(self.waiting, policies, self._service)

    @property
    def running(self) -> list[Request]:
        """Who runs, by first arrival. It walks all slots: not for every step."""
        return self.rows.running()

    @property
    def preemptions_total(self) -> int:
        """Requests that were taken out of the batch for the blocks of others."""
        return self._ladder.preemptions_total

    @property
    def class_preemptions_total(self) -> int:
        """Requests that were taken out of the batch for one of a higher class."""
        return self._ladder.class_preemptions_total

    @property
    def recomputed_tokens_total(self) -> int:
        """Tokens whose state was lost thereby."""
        return self._ladder.recomputed_tokens_total

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
        ) or never_fitting(request, self.budgets)
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
            # What is in the blocks of a request that failed may be why it did: nobody new gets them.
            self._running.leave(request, sound=outcome is not Outcome.FAILED)
        self.suspension.drop(request)
        request.status = RequestStatus.FINISHED
        request.outcome, request.error = outcome, error
        self.waiting.remove(request)
        self._ladder.latched_for = None  # whoever leaves reopens the entry
        return request

    def schedule(self, now_us: int) -> StepPlan:
        """The batch of the next step. What it takes is taken now; `update` settles it."""
        self._running.now_us = now_us
        expired = self._expire(now_us)
        drain_reason = self.must_drain_first()
        if drain_reason is not None:
            return StepPlan(self.step, expired=expired, drain_reason=drain_reason)
        step = Step(self.step + 1, now_us, self.limits, self.budgets)
        free_before = self.pool.num_free
        try:
            self._decodes.schedule(step)
            self._shares.schedule(step)
            self._entry.make_way(step)
        except DrainFirst as drain:
            return StepPlan(self.step, expired=expired, failed=tuple(step.failed), drain_reason=drain.reason)
        self._entry.schedule(step)
        self._shares.share_out_the_rest(step)
        if self.drafts is not None:
            self.drafts.schedule(step, may_run=not len(self.window))
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
        if self.drafts is not None and self.drafts.pays:
            return "drafts"
        if (self.pool.num_fenced + self.window.optimistic_blocks) * STRANDED_SHARE > self.pool.num_blocks:
            return "stranded_blocks"
        return None

    def update(self, result: StepResult, now_us: int) -> Emissions:
        """Settle a step, and those after it whose results came earlier: what their callers are told."""
        self._running.now_us = now_us
        return self._settlement.take(result, now_us)

    def ran(self, plan: StepPlan, real_us: int) -> None:
        """A step took so long on the device; told before its result is settled, since that may end its requests."""
        if self.drafts is not None:
            self.drafts.ran(plan, real_us)
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

    def _seal(self, step: Step, expired: tuple[Request, ...], free_before: int) -> StepPlan:
        """The plan as it stands; from now on its requests are that far."""
        step.budgets.check()
        chunks = self._running.advance(step)
        runs = bool(len(step.decodes) or chunks)
        self.step += runs
        swap_out, swap_in = self.suspension.take_copies(step.number) if runs else ((), ())
        table_changes, optimistic_blocks = self._running.take_changes() if runs else ((), 0)
        waiting = step.waiting_reasons(len(self.waiting))
        plan = StepPlan(
            step=self.step,
            decodes=step.decodes,
            decode_starts=step.starts,
            chunks=chunks,
            prefill_tokens=step.prefill,
            context_tokens=step.context,
            prior_pairs=step.prior_pairs,
            table_changes=table_changes,
            preempted=tuple(step.preempted),
            swap_out=swap_out,
            swap_in=swap_in,
            expired=expired,
            failed=tuple(step.failed),
            idle_reason=None if runs else self._idle_reason(waiting),
            waiting_reasons=waiting,
            held_back=tuple(step.held_back),
            optimistic_blocks=optimistic_blocks,
            predicted_us=self._predict_us(step) + self.suspension.copies_us(swap_out, swap_in) if runs else 0,
            tokens_left=step.budgets.left("tokens"),
            prefill_left=step.budgets.left("prefill_tokens"),
            free_blocks_before=free_before,
            free_blocks_after=self.pool.num_free,
        )
        if runs:
            self.window.push(plan)
        return plan

    def _predict_us(self, step: Step) -> int:
        # To the device a decode with guesses is a chunk; its price is that of a decode and as many tokens more.
        drafting = [step.chunks[request][0] for request in step.drafts]
        return self.times.predict_us(
            len(step.decodes) + len(drafting),
            step.prefill - len(drafting),
            step.context + sum(drafting) + len(drafting),
            step.prior_pairs - sum(drafting),
        )

    def _idle_reason(self, waiting: tuple[tuple[IdleReason, int], ...]) -> IdleReason:
        if waiting:
            return waiting[0][0]
        return "in_flight" if len(self.window) else "no_requests"

    def _recompute_us(self, victim: Request) -> int:
        """What its state costs to compute again beside the others that run."""
        beside = max(1, self.rows.num_running - 1)
        chunk = max(1, self.limits.prefill_budget(beside, 0))
        return recompute_us(
            victim.num_computed, self.times, chunk_tokens=chunk, decode_requests=beside, context_tokens=0
        )

    def _lose_progress(self, request: Request) -> None:
        self._ladder.lose_progress(request)

    def _expire(self, now_us: int) -> tuple[Request, ...]:
        """End the requests whose deadline passed, or cannot be met any more: also where no slot is free."""
        late = [*self.waiting.expired(now_us), *self._running.overdue(now_us)]
        return tuple(request for request in late if self.end(request.id, Outcome.EXPIRED))

    def _contain(self, request: Request, error: Exception, step: Step) -> None:
        """An impossible state while planning for one request: that request fails, and the step goes on."""
        step.take_back(request)
        self._note_fault(request, error)
        if self.end(request.id, Outcome.FAILED, f"a fault of the scheduler: {error}") is not None:
            step.failed.append(request)

    def _note_fault(self, request: Request, error: Exception) -> None:
        if self.strict:
            raise error
        self.faults_total += 1
        self.faults.append(f"request {request.id}: {type(error).__name__}: {error}")


def _alone_tokens(limits: StepLimits) -> int:
    """Most prefill that one request gets in a step when nothing else runs."""
    per_step = limits.prefill_budget(0, 0)
    if limits.max_prefill_tokens_per_request is not None:
        per_step = min(per_step, limits.max_prefill_tokens_per_request)
    return max(1, per_step)
