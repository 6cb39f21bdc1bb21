"""A request's life in sentences.

Owns the words. Pure; times are told from the arrival, long lists in part. Start reading at `tell`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sluice_operator.records.life import ChoiceLife, Chunk, ChunkReason, Gaps, Life, Suspension, Wait
from sluice_operator.records.times import clock, span
from sluice_sidecar.telemetry.decisions import Decision

# Chunks that are told one by one; of more, the first and the last few.
MOST_CHUNKS = 8

_HELD = {
    "no_free_slots": "no slot was free",
    "adapters_in_use": "as many adapters were in use as may be",
    "no_free_blocks": "too few KV blocks were free",
    "entry_latched": "entry was shut after a preemption",
    "budget_exhausted": "the step's tokens were spent",
    "behind_others": "others stood before it",
    "in_flight": "steps in flight had to be settled first",
    "shared_prompt": "its prompt was being computed for the first choice of its call",
}
_CHUNK = {
    "rest": "all that was left of it",
    "token_budget": "the step's token budget was spent",
    "own_share": "as much of one request as a step may carry at that depth",
}
_ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OUTCOMES = {
    "stop": "The model ended it",
    "length": "It reached its length",
    "aborted": "Its client left",
    "failed": "It failed in the engine",
    "expired": "Its deadline passed",
}
_ENDS = {
    "completed": "the answer was complete",
    "failed": "the engine broke off",
    "client_left": "the client left",
    "stalled": "the client read too slowly and was cut",
    "drained": "the pod was shut down",
}
_PRICES = {
    "cheaper": "the cheaper",
    "set": "as preemption.resume says",
    "no_host_pool": "there is no host pool to swap to",
    "host_pool_full": "the host pool was full",
    "nothing_computed": "nothing was lost",
}


def tell(life: Life, now_us: int | None = None) -> list[str]:
    """The sentences, a line each; what belongs to the line above is indented.

    `now_us`, where it is known, is the pod's clock as it told the life.
    """
    lines = [_title(life, now_us)]
    decision = life.decision
    origin_us = _origin_us(life)
    if decision is None:
        lines.append("The gate has forgotten it, so what was decided at the door is not known.")
    else:
        lines += _door(decision)
    for choice in life.choices:
        if len(life.choices) > 1:
            lines.append(f"Choice {choice.request_id.rpartition('/')[2]}:")
        lines += _choice(choice, life, origin_us)
    if decision is not None:
        lines += _end(decision)
    if not life.choices and decision is not None and decision.verdict == "admitted":
        lines.append("The engine's records do not name it: it ran before the oldest step that is kept, or has not yet.")
    return lines


def _title(life: Life, now_us: int | None) -> str:
    decision = life.decision
    known = f" (the client calls it {decision.client_id})" if decision is not None and decision.client_id else ""
    others = ""
    if life.same_client_id:
        others = f"; the client sent this id before, as {', '.join(life.same_client_id)}"
    came = "" if decision is None or now_us is None else f", came {span(now_us - decision.arrived_us)} ago"
    return f"{life.request_id}{known}{came}{others}"


def _origin_us(life: Life) -> int:
    """What times are told from: the arrival, or the first that is known of it."""
    if life.decision is not None:
        return life.decision.arrived_us
    begun = [chunk.begin_us for choice in life.choices for chunk in choice.chunks]
    begun += [wait.from_us for choice in life.choices for wait in choice.waits]
    return min(begun, default=0)


def _door(decision: Decision) -> Iterator[str]:
    if decision.choices:
        choices = "" if decision.choices == 1 else f" over {decision.choices} choices"
        asked = f"about {decision.prompt_tokens:,} prompt tokens and at most {decision.max_tokens:,} output tokens"
        yield f"It came to {_ROUTES.get(decision.route, decision.route)} and asked for {asked}{choices}."
        yield from _expected(decision)
    if decision.inside is not None:
        yield _prediction(decision)
    if decision.attempt:
        yield f"Its caller had tried {decision.attempt} time{'s' if decision.attempt > 1 else ''} before."
    waited = "" if decision.decided_us is None else f" for {span(decision.decided_us - decision.arrived_us)}"
    if decision.shed_by:
        because = f": {decision.held_because}" if decision.held_because else ""
        yield f"Under Enforce it would have been refused ({decision.shed_by}){because}; admission.mode is Observe."
    elif decision.held_by:
        yield f"It waited at the door{waited}: {decision.held_because} ({decision.held_by})."
    if decision.verdict == "admitted":
        assert decision.decided_us is not None
        yield f"The gate let it in {span(decision.decided_us - decision.arrived_us)} after it came."
    elif decision.verdict == "refused":
        back = ""
        if decision.retry_after_us is not None:
            back = f" It was told to come back in {span(decision.retry_after_us)}."
        yield f'The gate refused it ({decision.reason}): "{decision.message}"{back}'
    else:
        yield "The gate has not decided yet."


def _expected(decision: Decision) -> Iterator[str]:
    """What the gate reckoned with where that was less than what was asked for."""
    if 0 < decision.expected_tokens < decision.max_tokens:
        yield f"About {decision.expected_tokens:,} output tokens were expected, by the tenant's earlier answers."
    if decision.cached_tokens:
        yield f"{decision.cached_tokens:,} of its prompt tokens were expected to be computed already."


def _prediction(decision: Decision) -> str:
    inside = decision.inside
    most = "" if decision.sequences is None else f" of the {decision.sequences} that may run at once"
    text = "Nobody was inside" if not inside else f"{inside} {'was' if inside == 1 else 'were'} inside{most}"
    if decision.predicted_peak_blocks is not None:
        peak = f"{decision.predicted_peak_blocks:,} of the {decision.ceiling_blocks:,} that may be used"
        text += f"; the KV blocks were predicted to peak at {peak}"
    if decision.predicted_ttft_us is not None:
        promised = f", {span(decision.promised_ttft_us)} is promised" if decision.promised_ttft_us is not None else ""
        text += f"; the first token was predicted after {span(decision.predicted_ttft_us)}{promised}"
    return text + "."


def _choice(choice: ChoiceLife, life: Life, origin_us: int) -> Iterator[str]:
    if choice.is_cut:
        yield f"The engine's records begin at step {life.oldest_step:,}: what was before is not known."
    waits = iter(choice.waits)
    if len(choice.waits) > len(choice.suspensions):
        yield from _queue(next(waits))
    if choice.cached_tokens:
        yield f"{choice.cached_tokens:,} tokens of its prompt were in the prefix cache."
    yield from _prefill(choice, origin_us)
    for suspension in choice.suspensions:
        yield from _suspension(suspension, choice.request_id, origin_us)
        if (wait := next(waits, None)) is not None and wait.held_by:
            yield f"  Meanwhile {_gates(wait)}."
    yield from _tokens(choice, life, origin_us)
    if choice.most_beside is not None:
        yield _beside(choice)
    if life.decision is None and choice.status in _OUTCOMES:
        yield f"{_OUTCOMES[choice.status]}, after {choice.output_tokens or 0:,} output tokens."
    if choice.status in {"running", "waiting"}:
        where = "runs" if choice.status == "running" else "waits in the engine"
        yield f"It still {where}, with {choice.output_tokens or 0:,} output tokens so far."


def _queue(wait: Wait) -> Iterator[str]:
    if wait.until_us is None:
        held = f": {_gates(wait)}" if wait.held_by else ""
        yield f"It waits in the engine's queue{held}."
    elif wait.steps:
        held = f": {_gates(wait)}" if wait.held_by else ""
        during = f"while {wait.steps:,} steps ran" if wait.steps > 1 else "while 1 step ran"
        yield f"In the engine's queue it waited {span(wait.until_us - wait.from_us)}, {during}{held}."
    else:
        yield f"The engine took it into its next step, {span(wait.until_us - wait.from_us)} later."


def _gates(wait: Wait) -> str:
    return ", ".join(
        f"{_HELD.get(gate, gate)} (in {steps:,} step{'' if steps == 1 else 's'})"
        for gate, steps in wait.held_by.items()
    )


def _prefill(choice: ChoiceLife, origin_us: int) -> Iterator[str]:
    chunks = choice.chunks
    if not chunks:
        return
    tokens = sum(chunk.num_tokens for chunk in chunks)
    if len(chunks) == 1:
        yield f"Its prompt was computed in one step, {_chunk(chunks[0], origin_us)}"
        return
    is_repeated = any(suspension.choice != "swap" for suspension in choice.suspensions)
    again = " (what was lost and computed again included)" if is_repeated else ""
    yield f"{tokens:,} tokens of prefill were computed in {len(chunks)} chunks{again}:"
    cut = len(chunks) > MOST_CHUNKS + 1
    head = chunks[: MOST_CHUNKS - 2] if cut else chunks
    for chunk in head:
        yield f"  {_chunk(chunk, origin_us)}"
    if cut:
        yield f"  … {len(chunks) - MOST_CHUNKS} more …"
        for chunk in chunks[-2:]:
            yield f"  {_chunk(chunk, origin_us)}"


def _chunk(chunk: Chunk, origin_us: int) -> str:
    decodes = f"{chunk.decode_requests or 'no'} decode{'' if chunk.decode_requests == 1 else 's'}"
    took = f"took {span(chunk.real_us)}, predicted {span(chunk.predicted_us)}"
    where = f"step {chunk.step:,} at {clock(chunk.begin_us - origin_us)}"
    size = f"{chunk.num_tokens:,} tokens{f' from {chunk.start:,} on' if chunk.start else ''}, beside {decodes}"
    is_whole = chunk.reason == "rest" and not chunk.start
    return f"{where}: {size}; {took}{'' if is_whole else f'; {_why(chunk)}'}."


def _why(chunk: Chunk) -> str:
    reason: ChunkReason = chunk.reason
    if reason != "prefill_budget":
        return _CHUNK[reason]
    bound = "such a step may prefill within the promise" if chunk.decode_requests else "a step may compute"
    text = f"{chunk.prefill_budget_tokens:,} is all that {bound}"
    if chunk.others_prefill_tokens:
        text += f", and {chunk.others_prefill_tokens:,} went to others"
    return text


def _suspension(one: Suspension, request_id: str, origin_us: int) -> Iterator[str]:
    price = f"computing it again is priced at {span(one.recompute_us)}"
    if one.swap_us is not None:
        price += f", moving it to the host and back at {span(one.swap_us)}"
    because = f" ({_PRICES.get(one.reason, one.reason)})" if one.reason else ""
    needing = one.beneficiary_id.removesuffix("/0")
    what = (
        f"was preempted for {needing}"
        if one.beneficiary_id != request_id
        else "stepped back itself for want of a block"
    )
    yield (
        f"In step {one.step:,} at {clock(one.at_us - origin_us)} it {what} and gave up "
        f"{one.freed_blocks:,} blocks with {one.num_computed:,} tokens: {price}; to be "
        f"{'swapped' if one.choice == 'swap' else 'recomputed'}{because}."
    )
    if one.resumed_us is None:
        yield "  It has not come back since."
    else:
        yield f"  It came back in step {one.resumed_step:,}, {span(one.resumed_us - one.at_us)} later."


def _tokens(choice: ChoiceLife, life: Life, origin_us: int) -> Iterator[str]:
    promise = life.promise
    if choice.first_token_us is not None:
        after_us = choice.first_token_us - origin_us
        within = ""
        if promise is not None and life.decision is not None and choice.prompt_tokens is not None:
            promised_us = promise.ttft_promise_us(choice.prompt_tokens)
            within = f": {'within' if after_us <= promised_us else 'over'} the {span(promised_us)} that are promised"
        yield f"Its first token came of step {choice.first_token_step:,}, after {span(after_us)}{within}."
    if choice.gaps is not None:
        yield _gaps(choice.gaps, None if promise is None else promise.inter_token_latency_us)


def _gaps(gaps: Gaps, promised_us: int | None) -> str:
    text = f"Between its tokens lay {span(gaps.p50_us)} (median), {span(gaps.p99_us)} (p99), at most "
    cause = "it was preempted in between" if gaps.longest_preempted else ""
    if not cause and gaps.longest_prefill_tokens:
        cause = f"which carried {gaps.longest_prefill_tokens:,} tokens of prefill"
    text += f"{span(gaps.longest_us)}, before step {gaps.longest_step:,}{f', {cause}' if cause else ''}"
    if promised_us is not None:
        over = (
            f"{gaps.over:,} of {gaps.number:,} gaps {'was' if gaps.over == 1 else 'were'} longer"
            if gaps.over
            else "no gap was longer"
        )
        text += f"; {span(promised_us)} is promised, {over}"
    return text + "."


def _beside(choice: ChoiceLife) -> str:
    if not choice.num_neighbours:
        return "It ran alone."
    spread = str(choice.most_beside)
    if choice.least_beside != choice.most_beside:
        spread = f"{choice.least_beside} to {choice.most_beside}"
    most = ", ".join(f"{name.removesuffix('/0')} ({steps:,} steps)" for name, steps in choice.neighbours)
    rest = choice.num_neighbours - len(choice.neighbours)
    return f"It ran beside {spread} others, most with {most}{f', and {rest} more' if rest else ''}."


def _end(decision: Decision) -> Iterator[str]:
    if decision.verdict != "admitted":
        return
    if decision.ended_us is None:
        return
    what = _ENDS.get(decision.outcome, decision.outcome)
    tokens = "" if decision.output_tokens is None else f" with {decision.output_tokens:,} output tokens"
    yield f"It ended {span(decision.ended_us - decision.arrived_us)} after it came: {what}{tokens}."
    if decision.message:
        yield f'Its client was told ({decision.reason}): "{decision.message}"'
    if decision.gaps and decision.longest_gap_us is not None:
        over = f"{decision.gaps_over:,} of them" if decision.gaps_over else "none of them"
        longest = f"{decision.gaps:,} gaps, the longest {span(decision.longest_gap_us)}, {over} over the promise"
        yield f"At the door its client saw {longest}."
    if decision.promise:
        kept = {"kept": "kept", "ttft_missed": "missed for the first token", "itl_missed": "missed between tokens"}
        yield f"The promise was {kept.get(decision.promise, decision.promise)}."
