"""Demand and headroom as routers and autoscalers read them: headers, series and `/state`, at a real door."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sidecar.test_admission import Door
from sluice_engine import codec
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import AdmissionConfig, LiveConfig, SLOConfig, TenantConfig
from sluice_sidecar.admission import Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.errors import Reason
from sluice_sidecar.retries.attempts import Attempt
from sluice_sidecar.telemetry.headroom import demanded, headroom
from sluice_sidecar.telemetry.signals import headers_of
from sluice_sidecar.telemetry.state import GateState, Headroom

S = 1_000_000
ONE = Cost((ChoiceCost(100, 50),))


@pytest.fixture
def door() -> Door:
    return Door()


def test_headroom_is_what_is_left_of_slots_and_blocks(door: Door) -> None:
    empty_ = headroom(door.admission, door.now_us)
    assert (empty_.slots, empty_.blocks, empty_.class_cut) == (4, 95, "background")

    for name in "ab":
        door.admit(name)

    left = headroom(door.admission, door.now_us)
    assert left.slots == 2
    assert left.blocks == 95 - door.admission.room.peak_blocks(door.now_us) < 95


def test_the_class_cut_rises_as_the_pod_fills(door: Door) -> None:
    cuts = []
    for name in "abcd":
        door.admit(name)
        cuts.append(headroom(door.admission, door.now_us).class_cut)

    assert cuts == ["background", "background", "standard", None]


def test_tokens_per_second_are_unknown_without_traffic_and_none_without_room(door: Door) -> None:
    assert headroom(door.admission, door.now_us).tokens_per_second is None

    for name in "abcd":
        door.admit(name)

    full = headroom(door.admission, door.now_us)
    assert full.tokens_per_second == 0
    assert full.capacity_tokens_per_second is not None
    assert full.capacity_tokens_per_second > 100


def test_what_is_let_in_is_taken_from_the_headroom(door: Door) -> None:
    door.complete(door.admit("a"))
    door.now_us += 20 * S
    door.observe()

    found = headroom(door.admission, door.now_us)
    assert found.capacity_tokens_per_second is not None
    assert found.tokens_per_second == found.capacity_tokens_per_second - 150 // 20


def test_an_engine_that_is_gone_has_no_headroom(door: Door) -> None:
    door.admission.set_unavailable(Reason.ENGINE_DEAD, door.now_us)

    found = headroom(door.admission, door.now_us)

    assert (found.slots, found.blocks, found.tokens_per_second, found.class_cut) == (0, 0, 0, None)


def test_demand_is_what_was_let_in_what_waits_and_what_was_shed(door: Door) -> None:
    for name in "abcd":
        door.admit(name)
    ticket = door.enter("e")
    assert isinstance(ticket, Ticket)
    waiting = demanded(door.admission, door.now_us)
    assert waiting.queued_tokens == 150
    assert waiting.queued_block_seconds > 0

    door.now_us = ticket.deadline_us
    door.admission.expire(ticket, door.now_us)

    after = demanded(door.admission, door.now_us)
    assert (after.queued_tokens, after.queued_block_seconds) == (0, 0.0)
    assert after.shed_tokens_per_second == pytest.approx(after.admitted_tokens_per_second / 4)
    assert after.shed_blocks > 0
    assert door.admission.demand.tokens_total == {("admitted", "first"): 600, ("shed", "first"): 150}


def test_another_attempt_at_what_was_shed_is_no_new_demand(door: Door) -> None:
    for name in "abcd":
        door.admit(name)
    big = Cost((ChoiceCost(100, 50),) * 4)
    for number in range(3):
        door.admission.enter(f"r{number}", big, door.now_us, lambda _: None, waited_us=2 * S, attempt=Attempt(number))

    assert door.admission.demand.tokens_total["shed", "first"] == 600
    assert door.admission.demand.tokens_total["shed", "retry"] == 1200
    shed = demanded(door.admission, door.now_us).shed_tokens_per_second
    assert shed == demanded(door.admission, door.now_us).admitted_tokens_per_second


def test_a_quota_is_no_shortage_of_the_pod() -> None:
    live = LiveConfig(
        slo=SLOConfig(time_to_first_token_us=2 * S, inter_token_latency_us=100_000),
        admission=AdmissionConfig(tenants=(TenantConfig(name="t", tokens_per_second=1),)),
    )
    door = Door(live=live)
    for number in range(50):
        door.enter(f"r{number}", ONE, Terms(tenant="t"))

    assert door.admission.demand.tokens_total["shed", "first"] == 0


@pytest.mark.parametrize(
    ("room", "header"),
    [
        pytest.param((3, 120, 5400, "batch"), "slots=3, blocks=120, tokens-per-second=5400", id="all-is-known"),
        pytest.param((0, 0, None, None), "slots=0, blocks=0", id="what-nobody-knows-is-left-out"),
    ],
)
def test_the_header_of_headroom(room: tuple[int, int, int | None, str | None], header: str) -> None:
    slots, blocks, tokens, cut = room
    found = headers_of(
        Headroom(slots=slots, blocks=blocks, tokens_per_second=tokens, capacity_tokens_per_second=None, class_cut=cut)
    )

    assert found == {"x-sluice-headroom": header, "x-sluice-class-cut": cut or "none"}


async def test_every_answer_tells_routers_what_is_left(engine: ScriptedEngine, gate: RunningGate) -> None:
    async with gate.post() as response:
        await response.read()
    assert response.headers["x-sluice-headroom"].startswith("slots=")
    assert response.headers["x-sluice-class-cut"] == "background"

    async with gate.post(stream=False) as response:
        await response.read()
    assert "x-sluice-headroom" in response.headers


async def test_a_refusal_says_that_no_class_is_let_in(socket_dir: Path) -> None:
    hold = asyncio.Event()
    async with (
        ScriptedEngine(socket_dir / "engine.sock", state=ready_state()).running() as engine,
        running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate,
    ):
        engine.script = Script(hold_token={0: hold})
        inside = [asyncio.create_task(_read(gate)) for _ in range(4)]
        await until(lambda: len(gate.gate.admission.room.ledger.entries) == 4)
        gate.gate.signals._as_of_us = None

        async with gate.post() as response:
            await response.read()
        state = await _state(gate)
        hold.set()
        await asyncio.gather(*inside)
        await empty(gate.gate)

    assert response.status == 429
    assert response.headers["x-sluice-headroom"].startswith("slots=0,")
    assert response.headers["x-sluice-class-cut"] == "none"
    assert state.headroom is not None
    assert (state.headroom.slots, state.headroom.class_cut) == (0, None)
    assert state.demand is not None
    assert state.demand.shed_tokens_per_second > 0


async def _read(gate: RunningGate) -> Any:
    async with gate.post() as response:
        return await response.read()


async def _state(gate: RunningGate) -> GateState:
    async with gate.client.get(f"{gate.admin_url}/state") as response:
        return codec.from_json(GateState, await response.read(), "state")
