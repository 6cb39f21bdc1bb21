"""What the gate can say afterwards about each request that came to its door."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import ScriptedEngine, live_config, ready_state
from sluice_engine.core.state import PoolState
from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.telemetry.decisions import Decisions
from sluice_sidecar.telemetry.measure import StreamTimes


def _came_and_went(decisions: Decisions, name: str, at_us: int, *, refusal: Refusal | None = None) -> None:
    decisions.asked(name, "", "chat", at_us)
    decision = decisions.priced(name, Cost((ChoiceCost(10, 5),)), at_us, Terms())
    if refusal is None:
        decision.admitted(at_us)
    decisions.ended(name, "completed" if refusal is None else "refused", at_us + 1, refusal, None)


def test_a_storm_of_refusals_does_not_push_out_what_was_let_in() -> None:
    decisions = Decisions(kept=3)
    for number in range(5):
        _came_and_went(decisions, f"in-{number}", number)
    for number in range(1000):
        _came_and_went(decisions, f"out-{number}", 100 + number, refusal=Refusal(Reason.SLOTS, "Busy."))
    decisions.asked("here", "", "chat", 5000)

    names = [decision.request_id for decision in decisions.last(100)]

    assert names == ["in-2", "in-3", "in-4", "out-997", "out-998", "out-999", "here"]


def test_the_last_are_the_last_by_arrival() -> None:
    decisions = Decisions()
    for number in range(4):
        _came_and_went(decisions, str(number), number, refusal=Refusal(Reason.SLOTS, "Busy.") if number % 2 else None)

    assert [decision.request_id for decision in decisions.last(3)] == ["1", "2", "3"]
    assert decisions.last(0) == []


def test_an_end_is_told_once_and_of_what_is_known_only() -> None:
    decisions = Decisions()
    decisions.ended("stranger", "completed", 1, None, None)
    _came_and_went(decisions, "a", 1)
    decisions.ended("a", "failed", 2, None, StreamTimes(0, 1))
    decisions.first_token("a", 3)

    assert [(d.request_id, d.outcome, d.first_token_us) for d in decisions.last(9)] == [("a", "completed", None)]


async def decisions_of(gate: RunningGate, query: str = "") -> list[dict[str, Any]]:
    async with gate.client.get(f"{gate.admin_url}/decisions{query}") as response:
        assert response.status == 200
        document = await response.json()
    assert document.keys() == {"now_us", "decisions"}
    found: list[dict[str, Any]] = document["decisions"]
    return found


async def test_one_that_was_served_tells_what_was_predicted_and_what_came(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    engine.script.hold_token[1] = asyncio.Event()
    async with gate.post(headers={"x-request-id": "mine"}) as response:
        request_id = response.headers["x-sluice-request-id"]
        await until(lambda: gate.gate.admission.decisions.last(1)[0].first_token_us is not None)
        engine.script.hold_token[1].set()
        await response.read()
    await empty(gate.gate)

    (decision,) = await decisions_of(gate)

    assert (decision["request_id"], decision["client_id"], decision["route"]) == (request_id, "mine", "chat")
    assert (decision["verdict"], decision["outcome"], decision["reason"]) == ("admitted", "completed", "")
    assert (decision["choices"], decision["max_tokens"]) == (1, 16)
    assert (decision["expected_tokens"], decision["cached_tokens"]) == (16, 0), "nothing was learned yet"
    assert decision["gaps"] >= 1
    assert decision["inside"] == 0
    assert decision["predicted_peak_blocks"] is None, "an idle engine takes any one: its peak was not looked at"
    assert 0 < decision["predicted_ttft_us"] < decision["promised_ttft_us"]
    assert decision["arrived_us"] <= decision["decided_us"] <= decision["first_token_us"] <= decision["ended_us"]
    assert decision["longest_gap_us"] is not None
    assert decision["promise"] == "kept"


async def test_one_beside_others_tells_their_number_and_the_peak(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script.hold_token[1] = asyncio.Event()
    async with gate.post() as first, gate.post() as second:
        assert (first.status, second.status) == (200, 200)
        both = await decisions_of(gate)
        engine.script.hold_token[1].set()

    assert [decision["inside"] for decision in both] == [0, 1]
    assert both[1]["predicted_peak_blocks"] <= both[1]["ceiling_blocks"] == 85
    assert both[1]["sequences"] == 4
    assert [decision["outcome"] for decision in both] == ["", ""], "both are still inside"


async def test_a_refusal_tells_its_reason_and_what_held_it(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.state = ready_state(pool=PoolState(block_tokens=16, total_blocks=2, free_blocks=2), max_length_tokens=32)
    engine.script.hold_token[1] = asyncio.Event()
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=10_000)) as gate, gate.post():
        async with gate.post() as second:
            assert second.status == 429
        (_, decision) = await decisions_of(gate)
        engine.script.hold_token[1].set()

    assert (decision["verdict"], decision["outcome"], decision["reason"]) == ("refused", "refused", "kv_peak")
    assert decision["predicted_peak_blocks"] > decision["ceiling_blocks"]
    assert decision["held_by"] == "kv_peak", "it waited a moment at the door"
    assert decision["message"].startswith("The model is busy")


async def test_a_body_that_is_no_request_is_a_decision_too(gate: RunningGate) -> None:
    async with gate.client.post(f"{gate.url}/v1/completions", data=b"{") as response:
        assert response.status == 400

    (decision,) = await decisions_of(gate)

    assert (decision["verdict"], decision["reason"], decision["prompt_tokens"]) == ("refused", "invalid_json", 0)


async def test_a_client_that_left_is_told_from_one_that_was_served(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script.hold_token[1] = asyncio.Event()
    async with gate.post() as response:
        await response.content.readany()
        response.close()
    await until(lambda: gate.gate.in_flight == 0)

    (decision,) = await decisions_of(gate)

    assert (decision["verdict"], decision["outcome"]) == ("admitted", "client_left")


@pytest.mark.parametrize("last", ["0", "-1", "x", "4097", "1e3", ""])
async def test_a_number_of_decisions_that_is_none_is_refused(gate: RunningGate, last: str) -> None:
    async with gate.client.get(f"{gate.admin_url}/decisions?last={last}") as response:
        error = (await response.json())["error"]

    assert (response.status, error["param"], error["code"]) == (400, "last", "bad_request")
