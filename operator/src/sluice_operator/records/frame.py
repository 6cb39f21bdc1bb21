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

_BAR = 24


def frame(state: GateState, step: Step | None, *, most_requests: int, note: str = "") -> RenderableType:
    """The pod as it is now; of its requests the first so many."""
    engine = state.engine
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column()
    for name, text in _lines(state, engine, step):
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


def _lines(state: GateState, engine: EngineState | None, step: Step | None) -> Iterator[tuple[str, Text]]:
    yield "promise", _promise(state)
    yield "door", _door(state)
    if engine is None:
        return
    derived, pool = engine.derived, engine.pool
    if derived is not None and not derived.feasible:
        yield "infeasible", Text(derived.reason, style="red")
    most = 0 if derived is None else derived.max_sequences
    waiting = f"{engine.waiting_requests:,} waiting with {engine.waiting_tokens:,} tokens to prefill"
    yield "batch", _bar(engine.running_requests, most, f"{engine.running_requests:,} of {most:,} run, {waiting}")
    if pool is not None:
        used = pool.total_blocks - pool.free_blocks
        ceiling = f"ceiling {state.admission.kv_ceiling_percent:g} %"
        peak = f"predicted peak {state.admission.predicted_peak_blocks:,}"
        yield "KV", _bar(used, pool.total_blocks, f"{used:,} of {pool.total_blocks:,} blocks, {ceiling}, {peak}")
    if step is not None:
        yield from _step(step, engine)
    yield "preempted", Text(f"{engine.preemptions_total:,} in all, {state.measured.preemptions_per_minute:g} a minute")


def _promise(state: GateState) -> Text:
    promise, measured = state.promise, state.measured
    text = Text()
    for name, us, bound_us in (
        ("first token", measured.time_to_first_token_us, promise and promise.time_to_first_token_us),
        ("gaps", measured.inter_token_latency_us, promise and promise.inter_token_latency_us),
    ):
        within = us is None or not bound_us or us <= bound_us
        seen = "not seen" if us is None else span(us)
        text.append(f"{name} {seen}", style="" if us is None else "green" if within else "red")
        text.append(f" of {span(bound_us)}, " if bound_us else ", ")
    percent = "" if promise is None else f" at {promise.target_percent:g} %"
    text.append(f"{measured.good_requests:,} of {measured.requests:,} requests good in five minutes{percent}")
    return text


def _door(state: GateState) -> Text:
    door = state.admission
    now = f"shut: {door.reason}" if door.refuses else "open"
    text = Text(now, style="red" if door.refuses else "green")
    if door.only_watches:
        text.append(f" (Observe; Enforce would refuse: {door.reason})", style="yellow")
    refused = ", ".join(f"{reason} {number:,}" for reason, number in sorted(door.refused_total.items()))
    said = f"  {door.admitted_total:,} let in, {f'refused: {refused}' if refused else 'nobody refused'}"
    text.append(f"{said}; {door.ledger_requests:,} inside, {door.waiting_at_door:,} at the door", style="default")
    return text


def _step(step: Step, engine: EngineState) -> Iterator[tuple[str, Text]]:
    prefill = f"{step.prefill_tokens:,} prefill token{'' if step.prefill_tokens == 1 else 's'}"
    decodes = f"{step.decode_requests:,} decode{'' if step.decode_requests == 1 else 's'}"
    took = f"took {span(step.real_us)}, predicted {span(step.predicted_us)}"
    now = f"; the one in flight runs for {span(engine.step_running_us)}" if engine.step_running_us else ""
    yield "last step", Text(f"{step.number:,}: {decodes}, {prefill}; {took}{now}")
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


def _bar(value: int, most: int, text: str) -> Text:
    share = min(1.0, value / most) if most else 0.0
    filled = round(share * _BAR)
    result = Text("█" * filled, style="red" if share > 0.95 else "yellow" if share > 0.8 else "green")
    result.append("░" * (_BAR - filled), style="dim")
    result.append(f" {text}", style="default")
    return result


def _requests(requests: tuple[RequestState, ...], most: int) -> Iterator[RenderableType]:
    table = Table(box=None, padding=(0, 1))
    table.add_column("request")
    table.add_column("")
    for column in ("prompt", "computed", "output", "at most", "blocks", "preempted"):
        table.add_column(column, justify="right")
    ordered = sorted(requests, key=lambda request: request.status != "running")
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
        table.add_row(name, request.status, *(f"{number:,}" for number in numbers), style=style)
    yield table
    if len(ordered) > most:
        yield Text(f"… and {len(ordered) - most:,} more", style="dim")
