"""The corpus of malformed HTTP against a running gate, with aiohttp's C parser and, in its own process, without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from sidecar.http_corpus import CASES, CHAT, SIZE, Case, post
from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine
from sluice_sidecar.web import body as body_module
from sluice_sidecar.web import listener

IS_PURE = bool(os.environ.get("AIOHTTP_NO_EXTENSIONS"))


async def ask(gate: RunningGate, data: bytes) -> bytes:
    """All that comes back until the gate ends the connection."""
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(data)
    answer = b""
    try:
        # Reset after the answer: we are still sending what nobody will read.
        with suppress(ConnectionResetError):
            async with asyncio.timeout(10):
                while piece := await reader.read(65_536):
                    answer += piece
    finally:
        writer.close()
    return answer


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come is not waited for."""
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(listener, "LINGER_S", 0.05)
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_gets_its_status_and_none_of_it_goes_further(
    gate: RunningGate, engine: ScriptedEngine, case: Case
) -> None:
    statuses = case.pure if IS_PURE and case.pure is not None else case.statuses

    answer = await ask(gate, case.data)

    assert int(answer.split()[1]) in statuses
    assert set(engine.bodies) <= {CHAT}, "what is in the body of one request is no request"
    assert len(engine.bodies) == answer.count(b" 200 OK\r\n")
    if statuses is case.statuses:
        assert len(engine.bodies) == case.sound
    await empty(gate.gate)


@pytest.mark.slow
@pytest.mark.skipif(IS_PURE, reason="is what the test below starts")
def test_the_parser_without_extension_lets_nothing_more_through() -> None:
    environment = {**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]

    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-4_000:]


def test_the_gate_knows_which_parser_reads() -> None:
    assert listener.parser_is_compiled() is not IS_PURE


async def test_a_body_of_100_mb_is_refused_by_its_length_alone(gate: RunningGate) -> None:
    answer = await ask(gate, post(b"Content-Length: 104857600", body=b"x" * 100_000))

    assert b" 413 " in answer.split(b"\r\n")[0]
    await empty(gate.gate)


async def test_a_body_of_100_mb_in_chunks_is_never_held(engine: ScriptedEngine, socket_dir: Path) -> None:
    most = 0

    async def megabytes() -> AsyncIterator[bytes]:
        nonlocal most
        for _ in range(100):
            most = max(most, gate.gate.held.held_bytes)
            yield b"x" * 1_048_576

    async with running_gate(engine, socket_dir) as gate:
        with suppress(Exception):  # the gate may have closed while we were still sending
            async with gate.client.post(f"{gate.url}/v1/chat/completions", data=megabytes()) as response:
                assert response.status == 413
        await empty(gate.gate)
        assert gate.gate.admission.refused_total == {"body_too_large": 1}
        assert most <= gate.gate.config.body_limit_bytes + 1_048_576


async def test_a_client_that_says_nothing_is_closed(gate: RunningGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEPALIVE_TIMEOUT_S", 0.02)

    assert await ask(gate, b"") == b""


async def test_a_connection_serves_one_request_after_the_other(gate: RunningGate, engine: ScriptedEngine) -> None:
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    request = post(b"Content-Length: " + SIZE, body=CHAT, host=b"Host: a")
    for _ in range(3):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" not in head.lower()
        length = next(int(line.split(b": ")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        await reader.readexactly(length)
    writer.close()
    assert len(engine.bodies) == 3


async def test_an_upgrade_is_not_made_and_ends_the_connection(gate: RunningGate, engine: ScriptedEngine) -> None:
    upgrade = (b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: " + SIZE)

    answer = await ask(gate, post(*upgrade, body=CHAT, host=b"Host: a"))

    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"connection: close" in head
    assert b"upgrade" not in head
    assert "upgrade" not in engine.headers[0]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        pytest.param("a" * 128, True, id="long"),
        pytest.param("a" * 129, False, id="too-long"),
        pytest.param("one two", False, id="a-space"),
        pytest.param("émile", False, id="other-letters"),
    ],
)
async def test_an_id_of_the_clients_is_kept_where_it_can_be_one(
    gate: RunningGate, engine: ScriptedEngine, *, sent: str, kept: bool
) -> None:
    raw = b"x-request-id: " + sent.encode()

    answer = await ask(gate, post(raw, b"Content-Length: " + SIZE, body=CHAT))

    assert (sent.encode() in answer) is kept
    (headers,) = engine.headers
    assert headers["x-request-id"] == (sent if kept else headers["x-sluice-request-id"])
    (decision,) = gate.gate.admission.decisions.last(1)
    assert decision.client_id == (sent if kept else "")


async def test_a_header_that_came_twice_goes_on_as_one(gate: RunningGate, engine: ScriptedEngine) -> None:
    twice = (b"tracestate: a=1", b"tracestate: b=2", b"content-type: text/plain", b"Connection: x-mine", b"x-mine: 1")

    await ask(gate, post(*twice, b"Content-Length: " + SIZE, body=CHAT))

    (headers,) = engine.headers
    assert headers["tracestate"] == "a=1, b=2"
    assert headers["content-type"] == "text/plain"
    assert "x-mine" not in headers


async def test_a_malformed_body_in_the_middle_of_a_storm_of_aborts_leaves_nothing_behind(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    engine.script = Script(hold_token={1: asyncio.Event()})
    writers = []
    for number in range(40):
        _, writer = await asyncio.open_connection(gate.host, gate.port)
        writers.append(writer)
        writer.write(CASES[number % len(CASES)].data if number % 2 else post(b"Content-Length: " + SIZE, body=CHAT))
    await until(lambda: len(engine.active) >= 1)

    for writer in writers:
        writer.transport.abort()

    await empty(gate.gate)
    await until(lambda: not engine.active)
