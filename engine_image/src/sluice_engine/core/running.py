"""Who runs, and all that they hold: a slot, KV blocks, a place among the running. One way in, and one way out.

What is in flight for a request that leaves is stale from then on, and the blocks that it may still write are fenced.
Whoever needs more blocks than there are gets none here: that is the ladder's. Start reading at `enter` and `leave`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.budgets import Budgets
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.needs import LASTING, lasting_needs
from sluice_engine.core.order.deadlines import Deadlines
from sluice_engine.core.order.meter import Meter
from sluice_engine.core.plan import ScheduledRequest, TableChange
from sluice_engine.core.prefix_cache import PrefixCache, PrefixHit
from sluice_engine.core.request import Request, RequestStatus
from sluice_engine.core.rows import Rows
from sluice_engine.core.step import Step
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.window import Window

Fault = Callable[[Request, Exception], None]
"""What is told of an impossible state; it may raise."""


class Running:
    """The running requests of one scheduler."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        prefix: PrefixCache,
        window: Window,
        meter: Meter | None,
        more: Mapping[str, int],
        fault: Fault,
    ) -> None:
        """`more`: budgets beyond tokens, by name; those that last as long as a request runs are counted here."""
        self.rows = rows
        self.pool = pool
        self.prefix = prefix
        self.now_us = 0
        """The latest time that anybody told."""
        self.prefilling: list[Request] = []
        """Those with more to compute than one token, by first arrival."""
        self._window = window
        self._meter = meter
        self._fault = fault
        lasting = {name: limit for name, limit in more.items() if name in LASTING}
        self._held = Budgets({"requests": rows.num_slots, **lasting})
        self._deadlines = Deadlines()
        self._levels: Counter[int] = Counter()
        self._table_changes: list[TableChange] = []
        self._optimistic_blocks = 0

    def lacking(self, request: Request, limits: StepLimits) -> str | None:
        """The lasting budget that a request would exceed; None when it may run beside the others."""
        return "requests" if self.is_full(limits) else self._held.lacking(lasting_needs(request))

    def is_full(self, limits: StepLimits) -> bool:
        """Whether as many run as may."""
        return self.rows.num_running >= min(limits.max_sequences, self.rows.num_slots)

    def missing_blocks(self, request: Request, hit: PrefixHit) -> int:
        """Blocks that the pool lacks for all of a request's known input; not above zero when it has them."""
        own = blocks_for(request.num_tokens, self.pool.block_tokens) - hit.num_blocks
        return own + hit.num_unused - self.pool.num_free

    @property
    def least_urgent(self) -> int:
        """The highest priority number among them; 0 when nobody runs."""
        return max((level for level, count in self._levels.items() if count), default=0)

    def enter(self, request: Request, hit: PrefixHit) -> None:
        """Give a request that fits its blocks, what was found in the cache first, and a slot."""
        request.status = RequestStatus.RUNNING  # so that `leave` undoes all of this, wherever it may break
        self._levels[request.priority] += 1
        self._held.take(request, lasting_needs(request))
        self.prefix.take(request, hit)
        granted = self.pool.grow(request.blocks, request.num_tokens)
        assert granted, "entry was checked"
        if self._meter is not None:
            self._meter.entered(request, self.now_us)
        self.rows.enter(request)
        self._table_changes.append(TableChange(request.slot, 0, tuple(request.blocks), request.adapter))
        request.num_overtaken = 0
        if request.num_preemptions:
            # Not a victim again before all of it is computed again and a new token has come of it.
            request.protected_until = request.num_tokens
        if request.scheduled_us < 0:
            request.scheduled_us = self.now_us
        insort(self.prefilling, request, key=_arrival)
        self._deadlines.watch(request)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens`, or change nothing and return False."""
        self.prefix.settle(request, request.num_computed)
        first = len(request.blocks)
        if not self.pool.grow(request.blocks, num_tokens):
            return False
        if self._meter is not None:
            self._meter.grew(request, self.now_us)
        blocks = tuple(request.blocks[first:])
        self._table_changes.append(TableChange(request.slot, first, blocks))
        if len(self._window):
            self._optimistic_blocks += len(blocks)
        self.rows.until[request.slot] = self._until(request)
        return True

    def leave(self, request: Request, *, sound: bool = True) -> None:
        """Take a request out, with all that it holds; what is not sound is not kept for others.

        Each thing goes back whatever is wrong with another.
        """
        if request in self.prefilling:
            self.prefilling.remove(request)
        self._deadlines.forget(request)
        self._levels[request.priority] -= 1
        for part in (self._charge, self._share if sound else self.prefix.forget, self._release, self._held.take_back):
            try:
                part(request)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request
                self._fault(request, error)
        if request.slot >= 0:
            self.rows.leave(request)

    def overdue(self, now_us: int) -> list[Request]:
        """Those whose deadline has passed."""
        return self._deadlines.passed(now_us)

    def advance(self, step: Step) -> tuple[ScheduledRequest, ...]:
        """The step is planned: from now on its requests are that far. Its chunks, for the plan."""
        self.rows.start[step.decodes.slots] = step.starts + 1
        return tuple(
            self._advance_drafts(request, *share, step.drafts[request])
            if request in step.drafts
            else self._advance_chunk(request, *share)
            for request, share in step.chunks.items()
        )

    def take_changes(self) -> tuple[tuple[TableChange, ...], int]:
        """Since the last plan that ran: what the runner must be told of tables, and the blocks taken on optimism."""
        changes = tuple(self._table_changes), self._optimistic_blocks
        self._table_changes.clear()
        self._optimistic_blocks = 0
        return changes

    def _advance_chunk(self, request: Request, start: int, num_tokens: int) -> ScheduledRequest:
        slot, end = request.slot, start + num_tokens
        self.rows.start[slot] = end
        samples = end == request.num_tokens
        if samples:
            self.prefilling.remove(request)
            if end < request.peak_tokens:
                self.rows.start_decoding(slot, self._until(request))
        return ScheduledRequest(request, request.incarnation, slot, start, num_tokens, samples)

    @staticmethod
    def _advance_drafts(request: Request, start: int, num_tokens: int, drafts: tuple[int, ...]) -> ScheduledRequest:
        """How far it gets is known once the step is settled: nothing is planned before that."""
        slot, incarnation = request.slot, request.incarnation
        return ScheduledRequest(request, incarnation, slot, start, num_tokens, samples=True, drafts=drafts)

    def _until(self, request: Request) -> int:
        """Position up to which a decode needs nobody."""
        return min(len(request.blocks) * self.pool.block_tokens, request.peak_tokens)

    def _charge(self, request: Request) -> None:
        if self._meter is not None:
            self._meter.left(request, self.now_us)

    def _share(self, request: Request) -> None:
        self.prefix.settle(request, request.num_computed)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks, fence=self._window.newest_step)
        request.num_settled_blocks = 0


def _arrival(request: Request) -> int:
    return request.arrival_us
