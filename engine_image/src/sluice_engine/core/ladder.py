"""The memory ladder: what happens when a running request needs a block and there is none.

Cached blocks that nobody uses were dropped already (the pool does so), and who may wait waits. Then somebody is
preempted: whom is a policy of its own, and what becomes of its state is priced for each victim (`suspension`). Against
storms: entry is shut until somebody leaves, or the victim would fit with headroom. Start reading at `make_room`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice_engine.core.fit import blocks_for
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.order.waiting import Waiting
from sluice_engine.core.plan import Preemption
from sluice_engine.core.preemption import CLASS_LEVELS, Rank, choose_outranked, choose_victim
from sluice_engine.core.prefix_cache import PrefixHit
from sluice_engine.core.request import Request, RequestStatus
from sluice_engine.core.running import Running
from sluice_engine.core.step import Step
from sluice_engine.core.suspension import Suspension
from sluice_engine.core.window import DrainFirst, Window


class Ladder:
    """Who gives way to whom."""

    def __init__(
        self,
        running: Running,
        waiting: Waiting,
        window: Window,
        suspension: Suspension,
        policies: Policies,
        rank: Rank,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._window = window
        self._suspension = suspension
        self._policies = policies
        self._rank = rank
        self.preemptions_total = 0
        """Requests that gave way to a running one, for its blocks: the sign that too much was let in."""
        self.class_preemptions_total = 0
        """Requests that gave way to one of a higher class, so that it could enter."""
        self.recomputed_tokens_total = 0
        self.latched_for: int | None = None
        """Blocks that a victim needs to come back; entry is shut while this is set."""

    def make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Hold blocks for `num_tokens`, preempting if it must; False when the request cannot run in this step.

        Raises:
            DrainFirst: somebody would have to be preempted, and a victim must not be in flight.
        """
        running = self._running
        while not running.grow(request, num_tokens):
            if len(self._window):
                raise DrainFirst("preemption")
            most = self._policies.max_preemptions_per_request
            victim = choose_victim(running.rows.running(), request, self._rank, max_preemptions=most)
            if victim is None:
                return False
            self.preempt(victim, request, step)
            if victim is request:
                return False
        return True

    def outranks_any(self, first: Request) -> bool:
        """Whether a lower class runs that gives way to the first in line, if that is the policy."""
        return self._policies.order == "Priority" and self._running.least_urgent - first.priority >= CLASS_LEVELS

    def outranked(self, first: Request, hit: PrefixHit, step: Step) -> Sequence[Request]:
        """Requests of lower classes that give way to the first in line, where nothing else will do.

        `hit`: what it would find computed now.

        Raises:
            DrainFirst: there are some, and they may be in flight.
        """
        running = self._running
        missing = running.missing_blocks(first, hit)
        lacking = running.lacking(first, step.limits)
        if lacking not in {None, "requests"} or (missing <= 0 and lacking is None):
            return ()  # it would have to wait all the same, or it has what it needs
        victims = choose_outranked(
            running.rows.running(),
            first,
            self._rank,
            max_preemptions=self._policies.max_preemptions_per_request,
            enough=lambda some: sum(running.pool.freed_by(victim.blocks) for victim in some) >= missing,
        )
        if victims and len(self._window):
            raise DrainFirst("preemption")
        return victims

    def preempt(self, victim: Request, needing: Request, step: Step) -> None:
        """Take a request out of the batch and of this step, and put it back into the queue."""
        step.take_back(victim)
        pool = self._running.pool
        price = self._suspension.suspend(victim, step.now_us)
        num_computed, free_before = victim.num_computed, pool.num_free
        self._running.leave(victim)
        step.preempted.append(
            Preemption(
                request_id=victim.id,
                num_computed=num_computed,
                freed_blocks=pool.num_free - free_before,
                recompute_us=price.recompute_us,
                beneficiary_id=needing.id,
                swap_us=price.swap_us,
                choice=price.choice,
                reason=price.reason,
            )
        )
        if needing.status is RequestStatus.RUNNING:
            self.preemptions_total += 1
        else:
            self.class_preemptions_total += 1
        self.latched_for = blocks_for(victim.num_tokens, pool.block_tokens)
        if price.choice == "swap":
            victim.num_computed = num_computed  # what is left of its input is a chunk, as for all who enter
        else:
            self.recomputed_tokens_total += num_computed
            victim.num_computed = 0
        victim.incarnation += 1
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self._waiting.push(victim)

    def lose_progress(self, request: Request) -> None:
        """What a waiting request kept is gone: it begins again."""
        self._waiting.remove(request)
        self.recomputed_tokens_total += request.num_computed
        request.num_computed = 0
        self._waiting.push(request)

    def is_latched(self) -> bool:
        """Whether entry is still shut after a preemption."""
        if self.latched_for is None:
            return False
        if self._running.pool.num_free < self.latched_for + self._running.rows.num_running:
            return True
        self.latched_for = None
        return False
