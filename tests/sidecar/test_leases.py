"""How long a call that shows no movement keeps its entry in the ledger."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sidecar.foreign_server import ForeignServer
from sidecar.running import clock_us, empty, running_gate, until
from sidecar.scripted_engine import live_config, ready_state
from sluice_sidecar import leases
from sluice_sidecar.call import Call
from sluice_sidecar.capacity import ledger
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Ledger
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.engines import calibrate, connection

# Far longer than a busy machine keeps the loop from turning.
LEASE_US = 1_000_000


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LEASE_US", LEASE_US)
    monkeypatch.setattr(calibrate, "LONG_WORDS", 40)


@pytest.mark.parametrize("stream", [True, False], ids=["before-its-first-token", "whole"])
async def test_an_answer_of_another_engine_that_takes_longer_than_a_lease_keeps_its_entry(
    tmp_path: Path, *, stream: bool
) -> None:
    async with (
        ForeignServer().running() as server,
        running_gate(None, tmp_path, engine="vllm", engine_url=server.url) as gate,
    ):
        room = gate.gate.admission.room
        hold = server.hold_token[0] = asyncio.Event()

        async def ask() -> bytes:
            async with gate.post(stream=stream) as response:
                assert response.status == 200
                return cast("bytes", await response.read())

        task = asyncio.create_task(ask())
        await until(lambda: len(room.ledger.entries) == 1)
        began_us = clock_us()
        await until(lambda: clock_us() - began_us > 2 * LEASE_US)
        assert len(room.ledger.entries) == 1

        hold.set()
        assert b"tok" in await task
        await empty(gate.gate)
        assert (room.ledger.leases_expired_total, room.ledger.double_closes_total) == (0, 0)


@dataclass
class Transport:
    """A client's connection."""

    gone: bool = False

    def is_closing(self) -> bool:
        return self.gone


@pytest.mark.parametrize("end", ["it is cut", "its client has left", "the engine lists it"])
async def test_who_has_no_right_to_it_any_more_gets_no_more_of_it(end: str) -> None:
    limits = Limits.from_state(ready_state(), live_config())
    assert limits is not None
    held = Ledger(lists_requests=end == "the engine lists it")
    held.apply(ready_state(), limits, 0)
    permit = held.reserve("a", Cost((ChoiceCost(10, 10),)), 0)
    transport = Transport()
    call = cast("Call", SimpleNamespace(cut=None, request=SimpleNamespace(transport=transport)))
    now_us = 0

    def clock() -> int:
        nonlocal now_us
        now_us += 1
        return now_us

    with leases.renewed(call, permit, clock):
        if not held.lists_requests:
            await until(lambda: permit.entry.touched_us > 0)
        if end == "it is cut":
            call.cut = "drained"
        transport.gone = end == "its client has left"
        touched_us, began_us = permit.entry.touched_us, clock_us()
        await until(lambda: clock_us() - began_us > LEASE_US // 2)

    assert permit.entry.touched_us == touched_us
    assert [entry.id for entry in held.expire(touched_us + LEASE_US + 1)] == ["a"]


async def test_an_engine_that_vanished_from_its_network_breaks_the_connection(tmp_path: Path) -> None:
    body, kind = b'{"prompt": "x", "stream": true}', {"Content-Type": "application/json"}
    async with (
        ForeignServer().running() as server,
        running_gate(None, tmp_path, engine="vllm", engine_url=server.url) as gate,
    ):
        server.hold_token[1] = asyncio.Event()
        async with gate.gate.engine.request("POST", "/v1/completions", headers=kind, body=body) as answer:
            assert answer.connection is not None
            assert answer.connection.transport is not None
            sock = answer.connection.transport.get_extra_info("socket")

            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle_s, every_s, times = (
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name, _ in connection._PROBES
            )
            assert idle_s + every_s * times <= 60
