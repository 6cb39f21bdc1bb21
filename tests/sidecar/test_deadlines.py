"""Bounds that cannot be met are refused at the door, those that are missed end the call, in whatever window."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import LiveConfig
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal

S = 1_000_000
# 10 ms and 100 × 50 µs: alone its first token comes after 15 ms or, by a typical step, a little earlier.
COST = Cost((ChoiceCost(prompt_tokens=100, max_tokens=50),))


def admission(live: LiveConfig | None = None) -> Admission:
    door = Admission(
        live or live_config(ttft_us=60 * S, max_wait_us=0), stale_after_us=S, blind_after_us=5 * S, draw=min
    )
    door.observe(ready_state(), 0, 0)
    door.set_unavailable(None, 0)
    return door


def enter(door: Admission, name: str, terms: Terms, cost: Cost = COST) -> Permit | Refusal | Ticket:
    return door.enter(name, cost, 0, lambda _: None, terms=terms)


def test_a_bound_that_an_idle_pod_cannot_meet_is_refused_and_not_to_be_retried() -> None:
    found = enter(admission(), "a", Terms(first_token_us=5_000))

    assert isinstance(found, Refusal)
    assert (found.reason, found.status, found.should_retry) == (Reason.DEADLINE_UNREACHABLE, 429, False)
    assert found.retry_after_us is None
    assert "0.01 s" in found.message


def test_a_bound_that_can_be_met_is_no_hindrance() -> None:
    assert isinstance(enter(admission(), "a", Terms(first_token_us=S, finish_us=S)), Permit)


def test_beside_others_the_bound_is_held_against_what_their_prefill_costs() -> None:
    door = admission()
    for name in ("b", "c", "d"):
        assert isinstance(enter(door, name, Terms(), Cost((ChoiceCost(200, 50),))), Permit)

    found = enter(door, "a", Terms(first_token_us=25_000))

    assert isinstance(found, Refusal)
    assert found.reason is Reason.DEADLINE_UNREACHABLE
    assert "beside those that run" in found.message
    assert isinstance(enter(admission(), "a", Terms(first_token_us=25_000)), Permit), "alone it would be in time"


def test_an_answer_whose_length_nobody_knows_is_not_refused_for_its_end() -> None:
    assert isinstance(enter(admission(), "a", Terms(finish_us=100_000)), Permit)


def test_an_answer_that_mostly_takes_longer_is_refused_for_its_end() -> None:
    expected = Cost((ChoiceCost(prompt_tokens=100, max_tokens=500, output_tokens=100),))

    found = enter(admission(), "a", Terms(finish_us=100_000), expected)

    assert isinstance(found, Refusal)
    assert found.reason is Reason.DEADLINE_UNREACHABLE
    assert "its last token" in found.message
    assert isinstance(enter(admission(), "a", Terms(finish_us=2 * S), expected), Permit)


def test_a_promise_of_its_own_is_load_when_it_cannot_be_kept_and_no_deadline() -> None:
    door = admission()
    for name in ("b", "c", "d"):
        enter(door, name, Terms(), Cost((ChoiceCost(200, 50),)))

    found = enter(door, "a", Terms(promise_us=25_000))

    assert isinstance(found, Refusal)
    assert (found.reason, found.should_retry) == (Reason.TTFT_PROMISE, True)
    assert isinstance(enter(admission(), "a", Terms(promise_us=1)), Permit), "an idle pod takes it and does its best"


def test_a_timer_that_is_a_little_early_makes_no_load_of_a_missed_deadline() -> None:
    door = admission(live_config(ttft_us=60 * S, max_wait_us=10 * S))
    for name in "bcde":
        enter(door, name, Terms())
    settled: list[Permit | Refusal] = []
    ticket = door.enter("a", COST, 0, settled.append, terms=Terms(first_token_us=300_000))
    assert isinstance(ticket, Ticket)

    door.expire(ticket, ticket.deadline_us - 500)

    assert isinstance(settled[0], Refusal)
    assert settled[0].reason is Reason.DEADLINE_MISSED


def test_a_bound_of_the_door_shortens_the_wait_and_is_answered_as_load() -> None:
    door = admission(live_config(ttft_us=60 * S, max_wait_us=10 * S))
    for name in "bcde":
        enter(door, name, Terms())
    settled: list[Permit | Refusal] = []

    ticket = door.enter("a", COST, 0, settled.append, terms=Terms(door_us=300_000))

    assert isinstance(ticket, Ticket)
    assert ticket.deadline_us == 300_000
    door.expire(ticket, 300_000)
    assert isinstance(settled[0], Refusal)
    assert settled[0].reason is not Reason.DEADLINE_MISSED
    assert settled[0].status == 429


@pytest.mark.parametrize(
    ("stream", "script"),
    [
        pytest.param(True, Script(hold_headers=asyncio.Event()), id="a-stream-before-its-headers"),
        pytest.param(False, Script(hold_headers=asyncio.Event()), id="a-whole-answer-before-its-headers"),
        pytest.param(False, Script(hold_token={1: asyncio.Event()}), id="a-whole-answer-on-its-way"),
    ],
)
async def test_a_call_whose_time_is_up_before_its_answer_is_504(
    engine: ScriptedEngine, gate: RunningGate, script: Script, *, stream: bool
) -> None:
    engine.script = script

    async with gate.post(stream=stream, headers={"x-sluice-timeout-ms": "150"}) as response:
        body = await response.json()

    assert (response.status, body["error"]["code"]) == (504, "deadline_missed")
    assert response.headers["x-should-retry"] == "false"
    await until(lambda: engine.aborted == 1)
    await empty(gate.gate)
    assert 'outcome="expired",route="chat"} 1.0' in gate.gate.metrics.page().decode()


@pytest.mark.parametrize(
    ("header", "held"),
    [
        pytest.param("x-sluice-ttft-ms", 0, id="no-first-token"),
        pytest.param("x-sluice-timeout-ms", 1, id="no-last-token"),
        pytest.param("x-envoy-expected-rq-timeout-ms", 1, id="what-envoy-would-cut"),
    ],
)
async def test_a_stream_whose_time_is_up_ends_in_an_error_event(
    engine: ScriptedEngine, gate: RunningGate, header: str, held: int
) -> None:
    engine.script = Script(hold_token={held: asyncio.Event()})

    async with gate.post(headers={header: "150"}) as response:
        text = (await response.read()).decode()

    assert response.status == 200
    assert '"code": "deadline_missed"' in text
    assert "[DONE]" not in text
    await until(lambda: engine.aborted == 1)
    await empty(gate.gate)
    assert 'outcome="expired",route="chat"} 1.0' in gate.gate.metrics.page().decode()


async def test_a_first_token_in_time_ends_the_watch_for_it(engine: ScriptedEngine, gate: RunningGate) -> None:
    more = asyncio.Event()
    engine.script = Script(hold_token={1: more})

    async with gate.post(headers={"x-sluice-ttft-ms": "300"}) as response:
        asyncio.get_running_loop().call_later(0.5, more.set)
        text = (await response.read()).decode()

    assert "[DONE]" in text


async def test_attempts_and_bounds_reach_the_decision_and_what_cannot_be_read_is_counted(
    engine: ScriptedEngine, gate: RunningGate
) -> None:
    headers = {"x-stainless-retry-count": "2", "x-envoy-attempt-count": "x", "grpc-timeout": "soon"}
    async with gate.post(headers=headers) as response:
        assert response.status == 200
        await response.read()
    await empty(gate.gate)

    assert gate.gate.admission.decisions.last(1)[0].attempt == 2
    page = gate.gate.metrics.page().decode()
    assert 'sluice_gate_unreadable_headers_total{header="x-envoy-attempt-count"} 1.0' in page
    assert 'sluice_gate_unreadable_headers_total{header="grpc-timeout"} 1.0' in page
    assert 'sluice_gate_retries_total{verdict="admitted"} 1.0' in page


async def test_who_gave_up_before_the_first_token_is_known_when_it_asks_again(
    engine: ScriptedEngine, gate: RunningGate
) -> None:
    engine.script = Script(hold_token={0: asyncio.Event()})
    impatient = asyncio.create_task(_read(gate))
    await until(lambda: len(engine.bodies) == 1)
    impatient.cancel()
    await empty(gate.gate)

    engine.script = Script()
    await _read(gate)
    await _read(gate)

    assert [decision.attempt for decision in gate.gate.admission.decisions.last(3)] == [0, 1, 0]


async def test_the_same_body_is_known_when_it_comes_back_after_a_refusal(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    hold = asyncio.Event()
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate:
        engine.script = Script(hold_token={0: hold})
        running = [asyncio.create_task(_read(gate)) for _ in range(4)]
        await until(lambda: len(gate.gate.admission.room.ledger.entries) == 4)
        for _ in range(2):
            async with gate.post() as response:
                await response.read()
        hold.set()
        await asyncio.gather(*running)
        await empty(gate.gate)
        attempts = [decision.attempt for decision in gate.gate.admission.decisions.last(10)]

    assert attempts == [0, 0, 0, 0, 0, 1]


async def _read(gate: RunningGate) -> None:
    async with gate.post() as response:
        await response.read()
