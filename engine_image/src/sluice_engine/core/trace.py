"""What every step did and why, kept in a ring of bounded size: `/steps`, and the source of explanations.

A record is made of numbers and ids only, never of the requests themselves, so it keeps nothing alive. It is kept as the
plan made it: the decodes of a step are three arrays, two of which it shares with the steps beside it. `StepRecord`, one
object for each share, is made when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from sluice_engine.core.plan import HeldBack, Ints, Objects, Preemption, ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRecord:
    """One request's share of a step."""

    request_id: str
    slot: int
    start: int
    num_tokens: int
    sampled: bool
    draft_tokens: int = 0
    """Of its tokens, guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it was planned and as it ran."""

    step: int
    start_us: int
    """On the engine's monotonic clock."""
    predicted_us: int
    real_us: int
    decode_requests: int
    prefill_tokens: int
    context_tokens: int
    prior_pairs: int
    scheduled: tuple[ScheduledRecord, ...]
    """Decodes, then chunks."""
    preempted: tuple[Preemption, ...]
    expired: tuple[str, ...]
    """Ids of requests whose deadline passed, or could not be met any more."""
    waiting_reasons: dict[str, int]
    """Requests that stayed out, by the gate that held them."""
    held_back: tuple[HeldBack, ...]
    """Those of them that were looked at, in the queue's order."""
    idle_reason: str | None
    tokens_left: int
    prefill_left: int
    free_blocks_before: int
    free_blocks_after: int
    optimistic_blocks: int
    """Blocks taken for tokens that follow tokens in flight."""
    swapped_out_blocks: int
    """KV blocks that were copied to the host before the step computed."""
    swapped_in_blocks: int
    """KV blocks that were copied back."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A step as the ring keeps it."""

    record: StepRecord
    """Its chunks alone are scheduled."""
    ids: Objects
    slots: Ints
    starts: npt.NDArray[np.int32]

    def whole(self) -> StepRecord:
        """With one object for each decode."""
        decodes = tuple(
            ScheduledRecord(request_id=request_id, slot=slot, start=start, num_tokens=1, sampled=True)
            for request_id, slot, start in zip(self.ids, self.slots.tolist(), self.starts.tolist(), strict=True)
        )
        return replace(self.record, scheduled=decodes + self.record.scheduled)


class StepTrace:
    """The last steps. Appended by the engine's thread, read by others: a deque's append and copy are atomic."""

    def __init__(self, size: int = 4096) -> None:
        self._kept: deque[_Kept] = deque(maxlen=size)

    def append(self, plan: StepPlan, start_us: int, real_us: int) -> None:
        """Keep a plan that ran; the oldest makes room."""
        decodes = plan.decodes
        record = StepRecord(
            step=plan.step,
            start_us=start_us,
            predicted_us=plan.predicted_us,
            real_us=real_us,
            decode_requests=len(decodes),
            prefill_tokens=plan.prefill_tokens,
            context_tokens=plan.context_tokens,
            prior_pairs=plan.prior_pairs,
            scheduled=tuple(map(_chunk_record, plan.chunks)),
            preempted=plan.preempted,
            expired=tuple(request.id for request in plan.expired),
            waiting_reasons=dict(plan.waiting_reasons),
            held_back=plan.held_back,
            idle_reason=plan.idle_reason,
            tokens_left=plan.tokens_left,
            prefill_left=plan.prefill_left,
            free_blocks_before=plan.free_blocks_before,
            free_blocks_after=plan.free_blocks_after,
            optimistic_blocks=plan.optimistic_blocks,
            swapped_out_blocks=len(plan.swap_out),
            swapped_in_blocks=len(plan.swap_in),
        )
        self._kept.append(_Kept(record, decodes.ids, decodes.slots, plan.decode_starts.astype(np.int32)))

    def last(self, count: int) -> list[StepRecord]:
        """The last `count` records, oldest first."""
        return list(self.each(count))

    def each(self, count: int) -> Iterator[StepRecord]:
        """The same one by one, each made when it is asked for."""
        kept = self._kept.copy()
        return (step.whole() for step in islice(kept, max(0, len(kept) - count), None))


def _chunk_record(chunk: ScheduledRequest) -> ScheduledRecord:
    return ScheduledRecord(
        request_id=chunk.request.id,
        slot=chunk.slot,
        start=chunk.start,
        num_tokens=chunk.num_tokens,
        sampled=chunk.samples,
        draft_tokens=len(chunk.drafts),
    )
