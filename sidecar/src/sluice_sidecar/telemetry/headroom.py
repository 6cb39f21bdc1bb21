"""How much more this pod can take, for routers and autoscalers: slots, blocks, tokens per second, classes.

Pure functions over what the gate knows. Must not decide about requests. Start reading at `headroom`.
"""

from __future__ import annotations

from bisect import bisect_left

from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.estimates.work import Work, total
from sluice_sidecar.telemetry.state import Demanded, Headroom

NONE = Headroom(slots=0, blocks=0, tokens_per_second=0, capacity_tokens_per_second=None, class_cut=None)


def headroom(admission: Admission, now_us: int) -> Headroom:
    """What is still to be had now, within the promise."""
    room = admission.room
    if room.limits is None or admission.unavailable is not None:
        return NONE
    slots = max(0, room.slots_for(100, now_us) - room.inside(now_us) - admission.waiting)
    blocks = max(0, room.ceiling_blocks(now_us) - room.peak_blocks(now_us))
    works, span_us = admission.demand.lately(now_us)
    capacity = capacity_tokens_per_second(room.limits, total(works.values()), room.ceiling_blocks(now_us))
    left = None
    if capacity is not None:
        left = max(0, capacity - works["admitted"].tokens * 1_000_000 // span_us) if slots and blocks else 0
    return Headroom(
        slots=slots,
        blocks=blocks,
        tokens_per_second=left,
        capacity_tokens_per_second=capacity,
        class_cut=admission.classes.lowest_let_in(room, now_us),
    )


def share_left(admission: Admission, now_us: int) -> float:
    """The share of what is scarcest, slots or blocks, that is still to be had: by which a router chooses."""
    left, room = headroom(admission, now_us), admission.room
    slots, blocks = max(1, room.slots_for(100, now_us)), max(1, room.ceiling_blocks(now_us))
    return min(left.slots / slots, left.blocks / blocks)


def demanded(admission: Admission, now_us: int) -> Demanded:
    """What is asked of this pod now, let in or not."""
    works, span_us = admission.demand.lately(now_us)
    admitted, shed, queued = works["admitted"], works["shed"], admission.queued_work()
    return Demanded(
        admitted_tokens_per_second=round(admitted.tokens * 1e6 / span_us, 1),
        shed_tokens_per_second=round(shed.tokens * 1e6 / span_us, 1),
        queued_tokens=queued.tokens,
        admitted_blocks=round(admitted.block_us / span_us, 1),
        shed_blocks=round(shed.block_us / span_us, 1),
        queued_block_seconds=round(queued.block_us / 1e6, 1),
    )


def capacity_tokens_per_second(limits: Limits, mix: Work, usable_blocks: int) -> int | None:
    """The most tokens a second within the promise, prefill and output together, at the mix of the work of late.

    With b requests running, a step decodes b tokens and carries p tokens of prefill beside them: as many as their
    outputs will need, and no more than keep the promise. Where that is fewer, prefill is the bottleneck, and outputs
    come no faster than their prompts. b is the best of all that slots and KV blocks allow. None without any work of
    late: then nothing tells what a token is here.
    """
    if not mix.requests or not mix.output_tokens:
        return None
    prefill_per_output = mix.prefill_tokens / mix.output_tokens
    step_us = max(1, limits.decode_step_us(limits.max_sequences))
    # Of all of them: blocks × time, over time.
    stay_us = mix.output_tokens * step_us + mix.prefill_tokens * limits.per_prefill_token_ns / 1000
    blocks_each = max(1.0, mix.block_us / max(1.0, stay_us))
    most = max(1, min(limits.max_sequences, int(usable_blocks / blocks_each)))
    # The most is at a point of the curve, where the promise begins to allow less prefill than is needed, or at the end.
    full = bisect_left(range(1, most + 1), True, key=lambda batch: _is_short(limits, batch, prefill_per_output))
    batches = {
        most,
        1,
        max(1, full),
        min(most, full + 1),
        *(batch for batch, _ in limits.decode_curve_us if 1 <= batch < most),
    }
    return max(int(_tokens_per_second(limits, batch, prefill_per_output)) for batch in batches)


def _is_short(limits: Limits, batch: int, prefill_per_output: float) -> bool:
    """Whether a step beside that many decodes may carry less prefill than their outputs need."""
    return limits.chunk_tokens(batch) < batch * prefill_per_output


def _tokens_per_second(limits: Limits, batch: int, prefill_per_output: float) -> float:
    prefill = min(batch * prefill_per_output, limits.chunk_tokens(batch))
    outputs = min(batch, prefill / prefill_per_output) if prefill_per_output else batch
    step_us = limits.decode_step_us(batch) + prefill * limits.per_prefill_token_ns / 1000
    return (prefill + outputs) * 1e6 / max(1.0, step_us)
