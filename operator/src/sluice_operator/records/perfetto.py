"""Steps as a trace that ui.perfetto.dev and chrome://tracing open: a row a slot, a row for the steps, counters.

Owns the mapping to the Trace Event Format (JSON object form): complete slices (`X`) on the rows of the slots, nested
async pairs (`b`, `e`) for waits that hold no slot, counters (`C`), instants (`i`), names (`M`). Events are sorted by
time, slices of one row never overlap, every pair is closed. Pure. Start reading at `trace_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator.records.source import Records
from sluice_operator.records.steps import Share, Step
from sluice_sidecar.telemetry.decisions import Decision

Event = dict[str, Any]

# Processes of the trace, in the order in which they are shown.
_ENGINE, _QUEUE, _COUNTERS = 1, 2, 3
_STEPS_ROW = 0
# Colours by the format's reserved names, so that a kind of work looks alike in every row.
_COLOURS = {"prefill": "thread_state_running", "decode": "good", "step": "grey"}


@dataclass(slots=True)
class _Slice:
    """One stay in a row; decodes of one request in a row of steps are one slice."""

    request_id: str
    kind: str
    first_step: int
    last_step: int
    begin_us: int
    end_us: int
    start: int
    tokens: int


def trace_of(records: Records) -> dict[str, Any]:
    """The trace as a JSON object; times are microseconds from its first event."""
    events = [
        *_steps_row(records.steps),
        *_slots(records.steps),
        *_waits(records),
        *_counters(records),
    ]
    origin_us = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] -= origin_us
    events.sort(key=lambda event: int(event["ts"]))
    slots = sorted({share.slot for step in records.steps for share in step.shares})
    model = "" if records.state is None or records.state.engine is None else records.state.engine.model
    return {
        "traceEvents": [*_names(slots), *events],
        "displayTimeUnit": "ms",
        "otherData": {"source": "sluice trace", "model": model, "clockOriginMicroseconds": origin_us},
    }


def _names(slots: Iterable[int]) -> Iterator[Event]:
    for number, (pid, name) in enumerate(((_ENGINE, "engine"), (_QUEUE, "waiting"), (_COUNTERS, "counters"))):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": number}}
    yield {"ph": "M", "name": "thread_name", "pid": _ENGINE, "tid": _STEPS_ROW, "args": {"name": "steps"}}
    for slot in slots:
        yield {"ph": "M", "name": "thread_name", "pid": _ENGINE, "tid": slot + 1, "args": {"name": f"slot {slot}"}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": _ENGINE,
            "tid": slot + 1,
            "args": {"sort_index": slot + 1},
        }


def _steps_row(steps: Iterable[Step]) -> Iterator[Event]:
    for step in steps:
        yield _complete(
            f"step {step.number}",
            "step",
            _STEPS_ROW,
            step.begin_us,
            step.end_us,
            {
                "decodes": step.decode_requests,
                "prefill tokens": step.prefill_tokens,
                "predicted µs": step.predicted_us,
                "real µs": step.real_us,
                "tokens left": step.tokens_left,
                "prefill left": step.prefill_left,
                "free blocks": step.free_blocks_after,
                "blocks swapped out": step.swapped_out_blocks,
                "blocks swapped in": step.swapped_in_blocks,
                "waiting": dict(step.waiting),
            },
        )


def _slots(steps: Iterable[Step]) -> Iterator[Event]:
    """Slices of the slots' rows: each prefill chunk, and each run of decodes."""
    last: dict[int, _Slice] = {}
    slot_of: dict[str, int] = {}
    for step in steps:
        for victim in step.preempted:
            yield _preemption(step, victim.request_id, slot_of.pop(victim.request_id, None), victim.choice)
        for share in step.shares:
            slot_of[share.request_id] = share.slot
            kind = "decode" if _is_decode(share) else "prefill"
            row = last.get(share.slot)
            if row is not None and _goes_on(row, share, kind, step.number):
                row.last_step, row.end_us, row.tokens = step.number, step.end_us, row.tokens + 1
                continue
            if row is not None:
                yield _drawn(row, share.slot)
            last[share.slot] = _Slice(
                share.request_id,
                kind,
                step.number,
                step.number,
                step.begin_us,
                step.end_us,
                share.start,
                share.num_tokens,
            )
    for slot, row in last.items():
        yield _drawn(row, slot)


def _is_decode(share: Share) -> bool:
    return share.num_tokens == 1 and share.sampled and share.start > 0


def _goes_on(row: _Slice, share: Share, kind: str, number: int) -> bool:
    same = (row.request_id, row.kind) == (share.request_id, "decode") and kind == "decode"
    return same and number == row.last_step + 1


def _drawn(row: _Slice, slot: int) -> Event:
    args = {
        "request": row.request_id,
        "from token": row.start,
        "tokens": row.tokens,
        "steps": f"{row.first_step} to {row.last_step}" if row.last_step > row.first_step else str(row.first_step),
    }
    name = f"{row.kind} {row.request_id.removesuffix('/0')}"
    return _complete(name, row.kind, slot + 1, row.begin_us, row.end_us, args)


def _preemption(step: Step, request_id: str, slot: int | None, choice: str) -> Event:
    return {
        "ph": "i",
        "name": f"preempted {request_id.removesuffix('/0')}",
        "cat": "preempted",
        "s": "t",
        "pid": _ENGINE,
        "tid": _STEPS_ROW if slot is None else slot + 1,
        "ts": step.begin_us,
        "args": {"request": request_id, "step": step.number, "to be": choice},
    }


def _complete(name: str, kind: str, row: int, begin_us: int, end_us: int, args: Mapping[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "cname": _COLOURS[kind],
        "pid": _ENGINE,
        "tid": row,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": dict(args),
    }


def _waits(records: Records) -> Iterator[Event]:
    """Times without a slot: at the door, in the queue, and away after a preemption."""
    steps = records.steps
    if not steps:
        return
    end_us = steps[-1].end_us
    first: dict[str, int] = {}
    lost: dict[str, int] = {}
    spans: list[tuple[str, str, int, int]] = []
    for step in steps:
        for share in step.shares:
            first.setdefault(share.request_id, step.begin_us)
            if (since_us := lost.pop(share.request_id, None)) is not None:
                spans.append(("preempted", share.request_id, since_us, step.begin_us))
        for victim in step.preempted:
            lost[victim.request_id] = step.begin_us
    spans += [("preempted", request_id, since_us, end_us) for request_id, since_us in lost.items()]
    for decision in records.decisions:
        spans += _arrival(decision, first, steps[0].begin_us, end_us)
    for number, (kind, request_id, begin_us, until_us) in enumerate(spans):
        if until_us <= begin_us:
            continue  # no wait at all
        both = {"cat": kind, "name": f"{kind} {request_id.removesuffix('/0')}", "id": number, "pid": _QUEUE, "tid": 0}
        yield {"ph": "b", "ts": begin_us, "args": {"request": request_id}, **both}
        yield {"ph": "e", "ts": until_us, "args": {}, **both}


def _arrival(
    decision: Decision, first: Mapping[str, int], oldest_us: int, end_us: int
) -> Iterator[tuple[str, str, int, int]]:
    """Its waits from the door to its first step, where they lie within the steps that are kept."""
    if decision.arrived_us < oldest_us or decision.arrived_us > end_us:
        return
    decided_us = end_us if decision.decided_us is None else decision.decided_us
    if decision.held_by:
        yield "at the door", decision.request_id, decision.arrived_us, decided_us
    if decision.verdict != "admitted":
        return
    for choice in range(decision.choices):
        request_id = f"{decision.request_id}/{choice}"
        if request_id in first or decision.ended_us is None:
            yield "waiting", request_id, decided_us, first.get(request_id, end_us)


def _counters(records: Records) -> Iterator[Event]:
    pool = None if records.state is None or records.state.engine is None else records.state.engine.pool
    seen: dict[str, Mapping[str, int]] = {}
    gates = sorted({gate for step in records.steps for gate in step.waiting})
    for step in records.steps:
        series = {
            "batch": {"decodes": step.decode_requests, "prefills": len(step.shares) - step.decode_requests},
            "prefill tokens": {"tokens": step.prefill_tokens},
            "KV blocks": {"free": step.free_blocks_after}
            if pool is None
            else {"used": pool.total_blocks - step.free_blocks_after},
            "queue": {gate: step.waiting.get(gate, 0) for gate in gates} or {"waiting": 0},
        }
        for name, values in series.items():
            if seen.get(name) != values:  # a counter holds until it is said anew
                seen[name] = values
                yield {"ph": "C", "name": name, "pid": _COUNTERS, "tid": 0, "ts": step.begin_us, "args": values}
