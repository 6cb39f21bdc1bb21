"""What every step did and why, kept in a ring of bounded size: `/steps`, and the source of explanations.

A record is made of numbers and ids only, never of the requests themselves, so it keeps nothing alive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from sluice_engine.core.plan import Preemption, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRecord:
    """One request's share of a step."""

    request_id: str
    slot: int
    start: int
    num_tokens: int
    sampled: bool


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
    preempted: tuple[Preemption, ...]
    waiting_reasons: dict[str, int]
    """Requests that stayed out, by the gate that held them."""
    idle_reason: str | None
    tokens_left: int
    prefill_left: int
    free_blocks_before: int
    free_blocks_after: int


def record_of(plan: StepPlan, start_us: int, real_us: int) -> StepRecord:
    """The lasting record of a plan that ran."""
    return StepRecord(
        step=plan.step,
        start_us=start_us,
        predicted_us=plan.predicted_us,
        real_us=real_us,
        decode_requests=plan.decode_requests,
        prefill_tokens=plan.prefill_tokens,
        context_tokens=plan.context_tokens,
        prior_pairs=plan.prior_pairs,
        scheduled=tuple(
            ScheduledRecord(
                request_id=entry.request.id,
                slot=entry.slot,
                start=entry.start,
                num_tokens=entry.num_tokens,
                sampled=entry.samples,
            )
            for entry in plan.scheduled
        ),
        preempted=plan.preempted,
        waiting_reasons=dict(plan.waiting_reasons),
        idle_reason=plan.idle_reason,
        tokens_left=plan.tokens_left,
        prefill_left=plan.prefill_left,
        free_blocks_before=plan.free_blocks_before,
        free_blocks_after=plan.free_blocks_after,
    )


class StepTrace:
    """The last steps. Appended by the engine's thread, read by others: a deque's append and copy are atomic."""

    def __init__(self, size: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def append(self, record: StepRecord) -> None:
        """Keep a record; the oldest makes room."""
        self._records.append(record)

    def last(self, count: int) -> list[StepRecord]:
        """The last `count` records, oldest first."""
        records = self._records.copy()
        return list(islice(records, max(0, len(records) - count), None))
