"""One frame of `sluice top`: what a pod does now, for a terminal.

Owns the words and the bars. Pure: a state and the last step in, something that rich can print out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice_engine.core.state import EngineState, RequestState
from sluice_operator.observed.loading import loading_text
from sluice_operator.records.steps import Step
from sluice_operator.records.times import span
from sluice_sidecar.telemetry.state import GateState

# A line has room for the longer bar from this width on; below it, every line of a usual pod fits into 80 columns.
_WIDE = 100
_LONG_BAR, _SHORT_BAR = 24, 12
_UNMEASURED = "–"


def frame(
    state: GateState, step: Step | None, *, most_requests: int, width: int = _WIDE, note: str = ""
) -> RenderableType:
    """The pod as it is now, on a screen so many columns wide; of its requests the first so many."""
    engine = state.engine
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column()
    for name, text in _lines(state, engine, step, _LONG_BAR if width >= _WIDE else _SHORT_BAR):
        lines.add_row(name, text)
    parts: list[RenderableType] = [_title(state, engine), lines]
    if engine is not None and engine.requests:
        parts += ["", *_requests(engine.requests, most_requests)]
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _title(state: GateState, engine: EngineState | None) -> Text:
    text = Text()
    if engine is None:
        text.append("the engine does not answer", style="bold red")
        return text
    text.append(engine.model or "no model", style="bold")
    text.append(
        f"  {'draining' if state.draining else loading_text(engine)}", style="green" if state.ready else "yellow"
    )
    text.append(f"  step {engine.step:,}")
    if engine.hung:
        text.append("  a step hangs", style="bold red")
    if state.freshness != "fresh":
        text.append(f"  the engine's state is {state.freshness}", style="yellow")
    if engine.failure:
        text.append(f"  {engine.failure}", style="red")
    return text


def _lines(state: GateState, engine: EngineState | None, step: Step | None, bar: int) -> Iterator[tuple[str, Text]]:
    yield "promise", _promise(state)
    yield "kept", _kept(state)
    yield from _door(state)
    if engine is None:
        return
    derived, pool = engine.derived, engine.pool
    if derived is not None and not derived.feasible:
        yield "infeasible", Text(derived.reason, style="red")
    most = 0 if derived is None else derived.max_sequences
    waiting = f"{engine.waiting_requests:,} waiting with {engine.waiting_tokens:,} tokens to prefill"
    yield "batch", _bar(bar, engine.running_requests, most, f"{engine.running_requests:,} of {most:,} run, {waiting}")
    if pool is not None:
        used = pool.total_blocks - pool.free_blocks
        ceiling = f"ceiling {state.admission.kv_ceiling_percent:g} %"
        peak = f"predicted peak {state.admission.predicted_peak_blocks:,}"
        yield "KV", _bar(bar, used, pool.total_blocks, f"{used:,} of {pool.total_blocks:,} blocks, {ceiling}, {peak}")
    if step is not None:
        yield from _step(step, engine)
    yield "preempted", Text(f"{engine.preemptions_total:,} in all, {state.measured.preemptions_per_minute:g} a minute")


def _promise(state: GateState) -> Text:
    promise, measured = state.promise, state.measured
    first_us, gap_us = measured.time_to_first_token_us, measured.inter_token_latency_us
    if promise is None:
        return Text(", ").join([_seen("first token", first_us, None), _seen("gaps", gap_us, None)])
    parts = [
        _seen("first token", first_us, promise.time_to_first_token_us),
        _seen("gaps", gap_us, promise.inter_token_latency_us),
        Text(f"at {promise.target_percent:g} %"),
    ]
    return Text(", ").join(parts)


def _seen(name: str, us: int | None, bound_us: int | None) -> Text:
    style = "" if us is None else "red" if bound_us and us > bound_us else "green"
    text = Text().append(f"{name} {_UNMEASURED if us is None else span(us)}", style=style)
    return text.append(f" of {span(bound_us)}" if bound_us else "", style="default")


def _kept(state: GateState) -> Text:
    """Of those that ended: one that still streams has a first token, and is neither good nor bad."""
    measured = state.measured
    if not measured.requests:
        return Text(f"{_UNMEASURED}, no request ended in five minutes")
    return Text(f"by {measured.good_requests:,} of {measured.requests:,} requests that ended in five minutes")


def _door(state: GateState) -> Iterator[tuple[str, Text]]:
    door = state.admission
    text = Text(f"shut: {state.shut}" if state.shut else "open", style="red" if state.shut else "green")
    if door.only_watches:
        text.append(f" (Observe; Enforce would refuse: {door.reason})", style="yellow")
    inside = f"; {door.ledger_requests:,} inside, {door.waiting_at_door:,} at it, {door.admitted_total:,} let in so far"
    yield "door", text.append(inside, style="default")
    refused = ", ".join(f"{reason} {number:,}" for reason, number in sorted(door.refused_total.items()) if number)
    if refused:
        yield "refused", Text(refused)


def _step(step: Step, engine: EngineState) -> Iterator[tuple[str, Text]]:
    prefill = f"{step.prefill_tokens:,} prefill token{'' if step.prefill_tokens == 1 else 's'}"
    decodes = f"{step.decode_requests:,} decode{'' if step.decode_requests == 1 else 's'}"
    took = f"took {span(step.real_us)}, predicted {span(step.predicted_us)}"
    yield "last step", Text(f"{step.number:,}: {decodes}, {prefill}; {took}")
    if engine.step_running_us:
        yield "this step", Text(f"runs for {span(engine.step_running_us)}")
    used = step.decode_requests + step.prefill_tokens
    budget, most = used + step.tokens_left, step.prefill_tokens + max(0, step.prefill_left)
    yield (
        "budgets",
        Text(f"{used:,} of {budget:,} tokens, {step.prefill_tokens:,} of {most:,} prefill tokens beside them"),
    )
    if step.waiting:
        yield "queue", Text(_held(step.waiting))


def _held(waiting: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} held by {gate}" for gate, number in waiting.items())


def _bar(length: int, value: int, most: int, text: str) -> Text:
    share = min(1.0, value / most) if most else 0.0
    filled = round(share * length)
    result = Text("█" * filled, style="red" if share > 0.95 else "yellow" if share > 0.8 else "green")
    result.append("░" * (length - filled), style="dim")
    result.append(f" {text}", style="default")
    return result


def _requests(requests: tuple[RequestState, ...], most: int) -> Iterator[RenderableType]:
    """Those that run, then those that wait: a column that says which would take what the numbers need of 80 columns."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("request", overflow="ellipsis")
    for column in ("prompt", "computed", "output", "at most", "blocks", "preempted"):
        table.add_column(column, justify="right", no_wrap=True)
    ordered = sorted(requests, key=lambda request: request.status != "running")
    last = ""
    for request in ordered[:most]:
        numbers = (
            request.prompt_tokens,
            request.computed_tokens,
            request.output_tokens,
            request.max_tokens,
            request.blocks,
            request.preemptions,
        )
        name = f"{request.id}/{request.choice}" if request.choice else request.id
        style = "dim" if request.status == "waiting" else ""
        if request.status != last:
            table.add_row(Text(request.status, style="bold"))
            last = request.status
        table.add_row(f" {name}", *(f"{number:,}" for number in numbers), style=style)
    yield table
    if len(ordered) > most:
        yield Text(f"… and {len(ordered) - most:,} more", style="dim")
