"""Who runs in the next step, with how many tokens, and who gives way. Knows no torch, no clock, no I/O.

There is no prefill phase and no decode phase: every request has `num_computed` tokens and a target, its known tokens,
and a step gives tokens to requests so that the one catches up with the other. Per step: running requests that need one
token come first (decode is reserved), then running requests with more to compute, inside the prefill budget, then entry
from the queue. Four budgets bound a step: tokens, prefill tokens, requests, KV blocks. Start reading at `schedule`.
"""

from __future__ import annotations

from bisect import insort

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derive import StepLimits
from sluice_engine.core.fit import unfit_reason
from sluice_engine.core.plan import (
    Emission,
    IdleReason,
    Preemption,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from sluice_engine.core.policies import ArrivalQueue
from sluice_engine.core.preemption import choose_victim
from sluice_engine.core.request import Outcome, Request, RequestStatus
from sluice_engine.core.steptime import StepTimes


class _Step:
    """The plan of one step while it is made: what is scheduled and what is left of each budget."""

    def __init__(self, tokens_left: int) -> None:
        self.tokens_left = tokens_left
        self.prefill_left = 0
        self.entries: dict[Request, ScheduledRequest] = {}
        self.decodes = 0
        self.prefill = 0
        self.context = 0
        self.prior_pairs = 0
        self.preempted: list[Preemption] = []

    def put(self, request: Request, num_tokens: int, *, is_decode: bool) -> None:
        start = request.num_computed
        end = start + num_tokens
        samples = end == request.num_tokens
        self.entries[request] = ScheduledRequest(request, request.incarnation, request.slot, start, num_tokens, samples)
        self.tokens_left -= num_tokens
        if is_decode:
            self.decodes += 1
            self.context += end
        else:
            self.prefill += num_tokens
            self.prior_pairs += num_tokens * start
            self.prefill_left -= num_tokens

    def take_back(self, request: Request) -> None:
        """Undo `put`: all that the request had taken in this step goes back."""
        entry = self.entries.pop(request, None)
        if entry is None:
            return
        self.tokens_left += entry.num_tokens
        if is_decoding(request):
            self.decodes -= 1
            self.context -= entry.start + entry.num_tokens
        else:
            self.prefill -= entry.num_tokens
            self.prior_pairs -= entry.num_tokens * entry.start
            self.prefill_left += entry.num_tokens


def is_decoding(request: Request) -> bool:
    """Whether all but the last sampled token is computed, so that one token catches up."""
    return request.num_computed == request.num_tokens - 1 and request.num_output > 0


class Scheduler:
    """Continuous batching: the batch is formed anew in every step."""

    def __init__(
        self,
        limits: StepLimits,
        pool: BlockPool,
        times: StepTimes,
        *,
        max_length_tokens: int,
        max_preemptions_per_request: int = 3,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.times = times
        self.max_length_tokens = max_length_tokens
        self.max_preemptions_per_request = max_preemptions_per_request
        self.requests: dict[str, Request] = {}
        """All that have not ended, by id."""
        self.running: list[Request] = []
        """By first arrival: the oldest is served first, also when blocks are short."""
        self.waiting = ArrivalQueue()
        self.step = 0
        self.preemptions_total = 0
        self.recomputed_tokens_total = 0
        self.stale_results_total = 0
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._latched_for: int | None = None
        """Blocks that a victim needs to come back; entry is shut while this is set."""

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
            self.waiting.push(request)
        return reason

    def end(self, request_id: str, outcome: Outcome, error: str | None = None) -> Request | None:
        """End a request in whatever state it is and free what it holds; None when it had ended already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        was_waiting = request.status is RequestStatus.WAITING
        if not was_waiting:
            self.running.remove(request)
            self._release(request)
        request.status = RequestStatus.FINISHED
        self.waiting.forget(request, was_waiting=was_waiting)
        request.outcome, request.error = outcome, error
        self._latched_for = None  # whoever leaves reopens the entry
        return request

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def schedule(self, now_us: int) -> StepPlan:
        """The batch of the next step. Blocks are allocated for it; `update` settles it."""
        self.step += 1
        step = _Step(self.limits.token_budget)
        free_before = self.pool.num_free
        self._schedule_decodes(step)
        step.prefill_left = self.limits.prefill_budget(step.decodes, step.context)
        self._schedule_prefills(step)
        held_back = self._schedule_entry(step, now_us)
        entries = tuple(step.entries.values())
        return StepPlan(
            step=self.step,
            scheduled=entries,
            decode_requests=step.decodes,
            prefill_tokens=step.prefill,
            context_tokens=step.context,
            prior_pairs=step.prior_pairs,
            preempted=tuple(step.preempted),
            idle_reason=None if entries else (held_back or "no_requests"),
            waiting_reasons=((held_back, len(self.waiting)),) if held_back and len(self.waiting) else (),
            predicted_us=self._predict_us(step) if entries else 0,
            tokens_left=step.tokens_left,
            prefill_left=step.prefill_left,
            free_blocks_before=free_before,
            free_blocks_after=self.pool.num_free,
        )

    def _schedule_decodes(self, step: _Step) -> None:
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or not is_decoding(request) or step.tokens_left <= 0:
                continue  # a victim of an older request, or not its turn
            if self._grow(request, request.num_computed + 1, step):
                step.put(request, 1, is_decode=True)

    def _schedule_prefills(self, step: _Step) -> None:
        for request in self.running:
            if request not in step.entries and not is_decoding(request):
                # Its blocks were all taken at entry, so a prefill never preempts.
                num_tokens = self._prefill_share(request, step)
                if num_tokens > 0:
                    step.put(request, num_tokens, is_decode=False)

    def _schedule_entry(self, step: _Step, now_us: int) -> IdleReason | None:
        """Let waiting requests in; why the first of those that stay out stays out, None when none does."""
        while (request := self.waiting.peek()) is not None:
            reason = self._entry_refusal(request, step)
            if reason is not None:
                return reason
            self.waiting.pop()
            self._enter(request, now_us)
            step.put(request, self._prefill_share(request, step), is_decode=False)
        return None

    def _entry_refusal(self, request: Request, step: _Step) -> IdleReason | None:
        # Entry fits the whole known input or does not happen: looking at the first chunk only makes long prompts
        # evict each other.
        needed = self.pool.missing(request.blocks, request.num_tokens)
        if step.preempted:
            return "entry_latched"
        if self._latched_for is not None:
            if self.pool.num_free < self._latched_for + len(self.running):
                return "entry_latched"
            self._latched_for = None
        if not self._free_slots:
            return "no_free_slots"
        if needed > self.pool.num_free:
            return "no_free_blocks"
        if self._prefill_share(request, step) <= 0:
            return "budget_exhausted"
        return None

    def _enter(self, request: Request, now_us: int) -> None:
        granted = self.pool.grow(request.blocks, request.num_tokens)
        assert granted, "entry was checked"
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        if request.num_preemptions:
            # Not a victim again before all of it is computed again and a new token has come of it.
            request.protected_until = request.num_tokens
        if request.scheduled_us < 0:
            request.scheduled_us = now_us
        insort(self.running, request, key=_arrival)

    def _prefill_share(self, request: Request, step: _Step) -> int:
        share = min(request.num_tokens - request.num_computed, step.tokens_left, step.prefill_left)
        cap = self.limits.max_prefill_tokens_per_request
        if cap is not None:
            share = min(share, cap)
        if share > 0 and (request.num_computed or step.prior_pairs):
            # The budget was made for the start of a prompt: a chunk that lies deeper costs more.
            share = min(
                share,
                self.limits.chunk_share(
                    step.decodes, step.context, request.num_computed, step.prefill, step.prior_pairs
                ),
            )
        return share

    def _predict_us(self, step: _Step) -> int:
        return self.times.predict_us(step.decodes, step.prefill, step.context, step.prior_pairs)

    def _grow(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Hold blocks for `num_tokens`, preempting if it must; False when the request cannot run in this step."""
        while not self.pool.grow(request.blocks, num_tokens):
            victim = choose_victim(self.running, request, max_preemptions=self.max_preemptions_per_request)
            if victim is None:
                return False
            self._preempt(victim, request, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, needing: Request, step: _Step) -> None:
        step.take_back(victim)
        step.preempted.append(
            Preemption(
                request_id=victim.id,
                num_computed=victim.num_computed,
                freed_blocks=len(victim.blocks),
                recompute_us=self._recompute_us(victim),
                beneficiary_id=needing.id,
            )
        )
        self.preemptions_total += 1
        self.recomputed_tokens_total += victim.num_computed
        self._latched_for = self.pool.missing([], victim.num_tokens)
        self.running.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.incarnation += 1
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.push(victim)

    def _recompute_us(self, victim: Request) -> int:
        """What its state costs to compute again beside other work: the step with it less the step without."""
        tokens = victim.num_computed
        with_it, without = (self.times.predict_us(1, n, 0) for n in (tokens, 0))
        return max(0, with_it - without)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_slots.append(request.slot)
        request.slot = -1

    def update(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Settle a step: advance what was computed, append what was sampled, end what is complete."""
        assert result.step == plan.step, f"result of step {result.step} for plan {plan.step}"
        sampled = {(token.request_id, token.incarnation): token for token in result.tokens}
        emissions: list[Emission] = []
        for entry in plan.scheduled:
            request = entry.request
            if request.status is not RequestStatus.RUNNING or request.incarnation != entry.incarnation:
                self.stale_results_total += 1  # it ended or was preempted after this step was planned
                continue
            request.num_computed = entry.start + entry.num_tokens
            if entry.samples:
                token = sampled.get((request.id, entry.incarnation))
                emissions.append(self._settle(request, token))
        return emissions

    def _settle(self, request: Request, token: SampledToken | None) -> Emission:
        if token is None or token.error is not None:
            error = "the runner gave no token" if token is None else token.error
            self.end(request.id, Outcome.FAILED, error)
            return Emission(request, outcome=Outcome.FAILED)
        request.tokens.append(token.token_id)
        if token.token_id in request.sampling.stop_token_ids:
            self.end(request.id, Outcome.STOP)
            return Emission(request, outcome=Outcome.STOP)
        if request.num_output >= request.sampling.max_tokens:
            self.end(request.id, Outcome.LENGTH)
            return Emission(request, token.token_id, token.logprob, Outcome.LENGTH)
        return Emission(request, token.token_id, token.logprob)

    def stuck(self, plan: StepPlan) -> list[Request]:
        """Requests that an empty plan leaves without any way on: they run alone and cannot grow.

        Entry checks that a request fits the pool alone, so this is a fault of ours; it ends in an error, not in a loop.
        """
        if plan.scheduled or plan.preempted or not self.running:
            return []
        return list(self.running)


def _arrival(request: Request) -> int:
    return request.arrival_us
