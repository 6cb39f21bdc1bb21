"""One request's life, put together from what gate and engine have recorded.

Owns the reading of the records: which shares were prefill and why they had their size, what was waited for, what a
preemption cost, how long the gaps were. Pure. Start reading at `life_of`; `story.py` puts it into sentences.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from sluice_engine.core.ended import EndedRequest
from sluice_engine.core.state import FinishedState, RequestState
from sluice_engine.live_config import SLOConfig
from sluice_operator.records.life import ChoiceLife, Chunk, ChunkReason, Gaps, Life, Suspension, Wait
from sluice_operator.records.source import Records
from sluice_operator.records.steps import Preempted, Share, Step
from sluice_sidecar.telemetry.measure import percentile

# Neighbours that are named; the rest is a number.
MOST_NEIGHBOURS = 3


def life_of(records: Records, name: str) -> Life | None:
    """The life of the request with this id: the gate's, the engine's (one choice), or the client's own.

    None when no record knows it. Of several attempts with one client's id it is the last.
    """
    # Most clients send no id of their own: none is no name.
    attempts = [one for one in records.decisions if name and name == one.client_id]
    call_id, _, choice = (attempts[-1].request_id, "", "") if attempts else name.partition("/")
    decision = next((one for one in reversed(records.decisions) if one.request_id == call_id), None)
    ids = [one for one in _choice_ids(records, call_id) if not choice or one == name]
    if not ids and (decision is None or choice):
        return None
    promise = None if records.state is None else records.state.promise
    admitted_us = decision.decided_us if decision is not None and decision.verdict == "admitted" else None
    return Life(
        request_id=call_id,
        decision=decision,
        same_client_id=tuple(one.request_id for one in attempts[:-1]),
        promise=promise,
        choices=tuple(_choice(records, one, admitted_us, promise) for one in ids),
        oldest_step=records.steps[0].number if records.steps else None,
    )


def _choice_ids(records: Records, call_id: str) -> list[str]:
    """Ids of all choices of a call that any record names, in order."""
    found = {share.request_id for step in records.steps for share in step.shares}
    found |= {one.request_id for step in records.steps for one in step.preempted}
    found |= {request_id for step in records.steps for request_id in (*step.held_back, *step.expired)}
    found = {request_id for request_id in found if request_id.partition("/")[0] == call_id}
    found |= {f"{one.id}/{one.choice}" for one in _stated(records) if one.id == call_id}
    found |= {one.request_id for one in records.ended if one.request_id.partition("/")[0] == call_id}
    return sorted(found, key=_index)


def _index(request_id: str) -> int:
    index = request_id.partition("/")[2]
    return int(index) if index.isdecimal() else 0


def _state_of(records: Records, request_id: str) -> RequestState | FinishedState | EndedRequest | None:
    """What is said of a choice last."""
    ended = next((one for one in records.ended if one.request_id == request_id), None)
    return ended or next((one for one in _stated(records) if f"{one.id}/{one.choice}" == request_id), None)


def _stated(records: Records) -> Iterable[RequestState | FinishedState]:
    engine = None if records.state is None else records.state.engine
    return () if engine is None else (*engine.finished, *engine.requests)


def _choice(records: Records, request_id: str, admitted_us: int | None, promise: SLOConfig | None) -> ChoiceLife:
    state = _state_of(records, request_id)
    if admitted_us is None and isinstance(state, EndedRequest):
        admitted_us = state.arrival_us
    ran = [(step, share) for step in records.steps if (share := step.share_of(request_id)) is not None]
    lost = [(step, one) for step in records.steps for one in step.preempted if one.request_id == request_id]
    chunks, tokens = _split(ran, lost)
    is_cut = _is_cut(records.steps, ran, admitted_us)
    others = [{share.request_id for share in step.shares} - {request_id} for step, _ in ran]
    neighbours = Counter(other for some in others for other in some)
    cached = ran[0][1].start if ran and not is_cut else 0
    return ChoiceLife(
        request_id=request_id,
        status=_status(state, request_id, records.steps),
        prompt_tokens=None if state is None else state.prompt_tokens,
        output_tokens=None if state is None else state.output_tokens,
        slot=ran[-1][1].slot if ran else None,
        cached_tokens=cached,
        waits=tuple(_waits(records.steps, request_id, admitted_us, ran, lost)),
        chunks=tuple(chunks),
        suspensions=tuple(_suspension(step, one, ran) for step, one in lost),
        first_token_us=tokens[0].end_us if tokens and not is_cut else None,
        first_token_step=tokens[0].number if tokens and not is_cut else None,
        decode_steps=len(ran) - len(chunks),
        last_step=ran[-1][0].number if ran else None,
        last_us=ran[-1][0].end_us if ran else None,
        least_beside=min(map(len, others), default=None),
        most_beside=max(map(len, others), default=None),
        neighbours=tuple(neighbours.most_common(MOST_NEIGHBOURS)),
        num_neighbours=len(neighbours),
        gaps=_gaps(tokens, lost, promise),
        is_cut=is_cut,
    )


def _is_cut(steps: Sequence[Step], ran: Sequence[tuple[Step, Share]], admitted_us: int | None) -> bool:
    """Whether it had begun before the oldest step that is kept."""
    if not ran or steps[0].number <= 1 or ran[0][1].start == 0:
        return False
    return ran[0][0] is steps[0] if admitted_us is None else admitted_us < steps[0].begin_us


def _status(state: RequestState | FinishedState | EndedRequest | None, request_id: str, steps: Sequence[Step]) -> str:
    if isinstance(state, RequestState):
        return state.status
    if state is not None:
        return state.outcome
    return "expired" if any(request_id in step.expired for step in steps) else ""


def _split(ran: Sequence[tuple[Step, Share]], lost: Sequence[tuple[Step, Preempted]]) -> tuple[list[Chunk], list[Step]]:
    """Its prefill chunks, and the steps that gave it a token."""
    chunks: list[Chunk] = []
    tokens: list[Step] = []
    losses = {step.number: one for step, one in lost}
    is_decoding, last_step, last_end = False, None, 0
    for step, share in ran:
        between = [
            one for number, one in losses.items() if last_step is not None and last_step <= number <= step.number
        ]
        if between:
            # A swapped one goes on where it was; one that lost its state begins anew.
            is_decoding = is_decoding and between[-1].choice == "swap" and share.start >= last_end
        if not (is_decoding and share.num_tokens == 1):
            chunks.append(_chunk(step, share))
        if share.sampled:
            tokens.append(step)
            is_decoding = True
        last_step, last_end = step.number, share.end
    return chunks, tokens


def _chunk(step: Step, share: Share) -> Chunk:
    reason: ChunkReason = "own_share"
    if share.sampled:
        reason = "rest"
    elif step.prefill_left <= 0:
        reason = "prefill_budget"
    elif step.tokens_left <= 0:
        reason = "token_budget"
    return Chunk(
        step=step.number,
        begin_us=step.begin_us,
        start=share.start,
        num_tokens=share.num_tokens,
        real_us=step.real_us,
        predicted_us=step.predicted_us,
        decode_requests=step.decode_requests,
        others_prefill_tokens=max(0, step.prefill_tokens - share.num_tokens),
        prefill_budget_tokens=step.prefill_tokens + max(0, step.prefill_left),
        reason=reason,
    )


def _waits(
    steps: Sequence[Step],
    request_id: str,
    admitted_us: int | None,
    ran: Sequence[tuple[Step, Share]],
    lost: Sequence[tuple[Step, Preempted]],
) -> Iterable[Wait]:
    """Its times in the queue: before its first step, and after each preemption."""
    begins = [(admitted_us, 0)] if admitted_us is not None else []
    begins += [(step.begin_us, step.number) for step, _ in lost]
    for from_us, after in begins:
        back = next((step for step, _ in ran if step.number > after), None)
        meanwhile = [
            step
            for step in steps
            if step.number > after and step.end_us > from_us and (back is None or step.number < back.number)
        ]
        held = Counter(
            gate
            for step in meanwhile
            for gate in ([step.held_back[request_id]] if request_id in step.held_back else step.waiting)
        )
        yield Wait(
            from_us=from_us,
            until_us=None if back is None else max(from_us, back.begin_us),
            steps=len(meanwhile),
            held_by=dict(held.most_common()),
        )


def _suspension(step: Step, one: Preempted, ran: Sequence[tuple[Step, Share]]) -> Suspension:
    back = next((other for other, _ in ran if other.number > step.number), None)
    return Suspension(
        step=step.number,
        at_us=step.begin_us,
        num_computed=one.num_computed,
        freed_blocks=one.freed_blocks,
        recompute_us=one.recompute_us,
        swap_us=one.swap_us,
        choice=one.choice,
        reason=one.reason,
        beneficiary_id=one.beneficiary_id,
        resumed_step=None if back is None else back.number,
        resumed_us=None if back is None else back.begin_us,
    )


def _gaps(tokens: Sequence[Step], lost: Sequence[tuple[Step, Preempted]], promise: SLOConfig | None) -> Gaps | None:
    pairs = list(itertools.pairwise(tokens))
    if not pairs:
        return None
    times = [after.end_us - before.end_us for before, after in pairs]
    longest = times.index(max(times))
    before, after = pairs[longest]
    bound_us = None if promise is None else promise.inter_token_latency_us
    return Gaps(
        number=len(times),
        p50_us=percentile(times, 50),
        p99_us=percentile(times, 99),
        longest_us=times[longest],
        over=0 if bound_us is None else sum(time > bound_us for time in times),
        longest_step=after.number,
        longest_prefill_tokens=after.prefill_tokens,
        longest_preempted=any(before.number < step.number <= after.number for step, _ in lost),
    )
