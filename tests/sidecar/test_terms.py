"""The terms of a call at the door: read, bounded, passed on with what is left of them, and missed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_engine.core.terms import Terms
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal

SECOND = 1_000_000


async def test_a_trusted_peer_names_class_and_tenant(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with (
        running_gate(engine, socket_dir, trusted_peers=("127.0.0.0/8",)) as gate,
        gate.post(headers={"x-sluice-class": "batch", "x-sluice-tenant": "team-a"}) as response,
    ):
        assert response.status == 200
        await response.read()

    assert engine.headers[-1]["x-sluice-class"] == "batch"
    assert engine.headers[-1]["x-sluice-tenant"] == "team-a"


async def test_forged_identity_is_stripped_and_counted(engine: ScriptedEngine, gate: RunningGate) -> None:
    async with gate.post(headers={"X-Sluice-Class": "critical", "x-sluice-tenant": "somebody-else"}) as response:
        assert response.status == 200
        await response.read()

    assert engine.headers[-1]["x-sluice-class"] == "standard"
    assert "x-sluice-tenant" not in engine.headers[-1]
    page = gate.gate.metrics.page().decode()
    assert 'sluice_gate_stripped_headers_total{header="x-sluice-class"} 1.0' in page
    assert 'sluice_gate_stripped_headers_total{header="x-sluice-tenant"} 1.0' in page


async def test_the_engine_is_told_what_is_left_of_the_bounds(engine: ScriptedEngine, gate: RunningGate) -> None:
    async with gate.post(headers={"x-sluice-ttft-ms": "5000", "x-sluice-timeout-ms": "60000"}) as response:
        await response.read()

    assert 4000 < int(engine.headers[-1]["x-sluice-ttft-ms"]) <= 5000
    assert 59_000 < int(engine.headers[-1]["x-sluice-timeout-ms"]) <= 60_000


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"x-sluice-ttft-ms": "soon"}, id="no-number"),
        pytest.param({"x-sluice-timeout-ms": "99999999999"}, id="three-years"),
    ],
)
async def test_an_absurd_bound_is_400_and_names_the_header(
    engine: ScriptedEngine, gate: RunningGate, headers: dict[str, str]
) -> None:
    async with gate.post(headers=headers) as response:
        body = await response.json()

    assert response.status == 400
    assert body["error"]["param"] == next(iter(headers))
    assert engine.bodies == []
    await empty(gate.gate)


async def test_no_time_at_all_is_504_before_anything_is_computed(engine: ScriptedEngine, gate: RunningGate) -> None:
    async with gate.post(headers={"x-sluice-timeout-ms": "0"}) as response:
        body = await response.json()

    assert response.status == 504
    assert body["error"]["code"] == "deadline_missed"
    assert response.headers["x-should-retry"] == "false"
    assert "Retry-After" not in response.headers
    assert engine.bodies == []
    await empty(gate.gate)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_missed_in_the_engine_is_504_and_no_failure_of_the_pod(
    engine: ScriptedEngine, gate: RunningGate, *, stream: bool
) -> None:
    engine.script = Script(status=504)

    async with gate.post(stream=stream, headers={"x-sluice-ttft-ms": "10"}) as response:
        body = await response.json()

    assert response.status == 504
    assert body["error"]["code"] == "deadline_missed"
    assert response.headers["x-should-retry"] == "false"
    await empty(gate.gate)
    page = gate.gate.metrics.page().decode()
    assert 'sluice_gate_requests_total{outcome="expired",route="chat"} 1.0' in page
    assert 'sluice_gate_refused_total{reason="deadline_missed"} 1.0' in page


async def test_a_deadline_missed_while_running_is_an_event_and_counts_as_expired(
    engine: ScriptedEngine, gate: RunningGate
) -> None:
    engine.script = Script(error_before_token=2)

    async with gate.post(headers={"x-sluice-timeout-ms": "10000"}) as response:
        text = (await response.read()).decode()

    assert response.status == 200
    assert text.count("data: ") == 4, "the role, two tokens, the error"
    assert '"code": "deadline_missed"' in text
    assert "[DONE]" not in text
    await empty(gate.gate)
    assert 'outcome="expired",route="chat"} 1.0' in gate.gate.metrics.page().decode()


async def test_a_caller_waits_at_the_door_no_longer_than_its_bound(socket_dir: Path) -> None:
    hold = asyncio.Event()
    state = ready_state()
    async with (
        ScriptedEngine(socket_dir / "engine.sock", state=state).running() as engine,
        running_gate(engine, socket_dir, live=live_config(ttft_us=60 * SECOND, max_wait_us=30 * SECOND)) as gate,
    ):
        engine.script = Script(hold_token={0: hold})
        inside = [asyncio.create_task(_read(gate)) for _ in range(4)]
        await until(lambda: len(engine.bodies) == 4)

        async with gate.post(headers={"x-sluice-ttft-ms": "200"}) as response:
            body = await response.json()
        hold.set()
        await asyncio.gather(*inside)
        await empty(gate.gate)

    assert response.status == 504
    assert body["error"]["code"] == "deadline_missed"
    assert len(engine.bodies) == 4


async def _read(gate: RunningGate) -> None:
    async with gate.post() as response:
        await response.read()


COST = Cost((ChoiceCost(prompt_tokens=16, max_tokens=16),))


def full_door(settled: list[Permit | Refusal], bound_us: int | None) -> tuple[Admission, Permit, Ticket]:
    """A door with one slot behind it, which is taken, and one who waits."""
    live = live_config(ttft_us=60 * SECOND, max_wait_us=30 * SECOND)
    admission = Admission(live, stale_after_us=SECOND, blind_after_us=5 * SECOND, draw=min)
    state = ready_state()
    assert state.derived is not None
    one = ready_state(derived=type(state.derived)(feasible=True, token_budget=512, max_sequences=1,
                                                  chunk_ceiling_tokens=256, kv_capacity_tokens=1600))  # fmt: skip
    admission.observe(one, 0, 0)
    admission.set_unavailable(None, 0)
    permit = admission.enter("inside", COST, 0, settled.append)
    assert isinstance(permit, Permit)
    ticket = admission.enter("waits", COST, 0, settled.append, terms=Terms(finish_us=bound_us))
    assert isinstance(ticket, Ticket)
    return admission, permit, ticket


def test_the_wait_ends_with_the_bound() -> None:
    settled: list[Permit | Refusal] = []
    admission, _, ticket = full_door(settled, SECOND)

    assert ticket.deadline_us == SECOND
    admission.expire(ticket, SECOND)

    assert isinstance(settled[0], Refusal)
    assert settled[0].reason is Reason.DEADLINE_MISSED


def test_room_that_comes_too_late_is_not_given() -> None:
    settled: list[Permit | Refusal] = []
    _, permit, _ = full_door(settled, SECOND)

    permit.close(SECOND + 1)

    assert isinstance(settled[0], Refusal)
    assert settled[0].reason is Reason.DEADLINE_MISSED


def test_room_that_comes_in_time_is_given() -> None:
    settled: list[Permit | Refusal] = []
    _, permit, _ = full_door(settled, SECOND)

    permit.close(SECOND - 1)

    assert isinstance(settled[0], Permit)
