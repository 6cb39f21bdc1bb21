"""Connections of clients below HTTP: what bounds a dead one, and one that is closed on one side only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config
from sluice_sidecar.web import body as body_module
from sluice_sidecar.web import listener
from sluice_sidecar.web.listener import KEEPALIVE_TIMEOUT_S, WRITE_BUFFER_BYTES, bind

BODY = b'{"messages": [], "max_tokens": 2, "stream": %s}'


def request(*, stream: bool = True, missing: int = 0) -> bytes:
    body = BODY % (b"true" if stream else b"false")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body[: len(body) - missing]


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        pytest.param(Script(hold_headers=asyncio.Event()), True, id="before-the-engine-answered"),
        pytest.param(Script(hold_token={0: asyncio.Event()}), True, id="before-the-first-token"),
        pytest.param(Script(hold_token={2: asyncio.Event()}), True, id="mid-stream"),
        pytest.param(Script(hold_token={0: asyncio.Event()}), False, id="while-a-whole-answer-is-made"),
    ],
)
async def test_a_client_that_closed_its_half_is_gone_and_its_request_with_it(
    gate: RunningGate, engine: ScriptedEngine, script: Script, *, stream: bool
) -> None:
    engine.script = script
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(request(stream=stream))
    await until(lambda: bool(engine.active))

    writer.write_eof()

    await until(lambda: engine.aborted == 1)
    await empty(gate.gate)
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()


async def test_one_that_closed_its_half_at_the_door_loses_its_place(engine: ScriptedEngine, socket_dir: Path) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={0: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=60_000_000, ttft_us=600_000_000)) as gate:
        writers = []
        for number in range(5):
            _, writer = await asyncio.open_connection(gate.host, gate.port)
            writers.append(writer)
            writer.write(request())
            await until(lambda: len(engine.active) + gate.gate.admission.waiting == number + 1)  # noqa: B023
        assert gate.gate.admission.waiting == 1

        writers[-1].write_eof()

        await until(lambda: gate.gate.admission.waiting == 0)
        assert len(engine.bodies) == 4
        hold.set()
        await empty(gate.gate)
        for writer in writers:
            writer.close()


async def test_one_that_closed_its_half_in_its_body_holds_nothing(gate: RunningGate, engine: ScriptedEngine) -> None:
    _, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(request(missing=3))
    await until(lambda: gate.gate.held.held_bytes > 0)

    writer.write_eof()

    await empty(gate.gate)
    assert engine.bodies == []
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost:"], ids=["nothing", "half-a-head"])
async def test_one_that_closed_its_half_before_a_request_is_closed(gate: RunningGate, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(sent)
    writer.write_eof()

    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    await empty(gate.gate)


async def test_slow_bodies_are_given_up_and_slow_ones_that_come_are_not(
    gate: RunningGate, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 5.0)
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    for byte in request():
        writer.write(bytes([byte]))
        await asyncio.sleep(0)

    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    await until(lambda: len(engine.bodies) == 1)
    await empty(gate.gate)


async def test_an_answer_that_nobody_reads_is_not_held_for_ever(
    engine: ScriptedEngine, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.text = "x" * 16 * 2**20
    lost = asyncio.Event()
    is_told = listener.GateProtocol.connection_lost

    def told(self: listener.GateProtocol, exc: BaseException | None) -> None:
        is_told(self, exc)
        lost.set()

    monkeypatch.setattr(listener.GateProtocol, "connection_lost", told)
    monkeypatch.setattr(listener, "ANSWER_TIMEOUT_S", 0.1)
    async with running_gate(engine, socket_dir, stall_timeout_us=100_000) as gate:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.setblocking(False)
            await loop.sock_connect(sock, (gate.host, gate.port))
            body = b'{"tokens": [1, 2]}'
            head = b"POST /detokenize HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(sock, head + body)
            async with asyncio.timeout(10):
                await lost.wait()
            await empty(gate.gate)

            num_read = 0
            with contextlib.suppress(ConnectionError):
                while piece := await loop.sock_recv(sock, 2**20):
                    num_read += len(piece)
    assert 0 < num_read < len(engine.text)


async def test_an_answer_that_is_read_is_whole_and_no_clock_runs_on(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.text = "x" * 4 * 2**20
    async with gate.client.post(f"{gate.url}/detokenize", data=b'{"tokens": [1]}') as response:
        assert (await response.json())["prompt"] == engine.text
    (protocol,) = gate.server.connections
    assert isinstance(protocol, listener.GateProtocol)
    assert protocol._unread_timer is None


async def test_the_kernel_bounds_what_a_vanished_client_can_hold(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(hold_token={0: asyncio.Event()})
    _, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(request())
    await until(lambda: bool(engine.active))
    (call,) = gate.gate._calls
    assert call.request.transport is not None
    sock = call.request.transport.get_extra_info("socket")

    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == WRITE_BUFFER_BYTES
    idle_s, every_s, times = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + every_s * times <= 30, "within the stall timeout"
    writer.close()
    await empty(gate.gate)


def test_an_idle_connection_outlives_the_reuse_of_common_gateways() -> None:
    assert KEEPALIVE_TIMEOUT_S > 60
    assert listener.HEADER_TIMEOUT_S < KEEPALIVE_TIMEOUT_S


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_address_of_all_takes_both_families(family: socket.AddressFamily) -> None:
    if family == socket.AF_INET6 and not listener._has_ipv6():
        pytest.skip("this machine has no IPv6")
    with bind("::", 0) as sock, socket.socket(family) as client:
        client.connect(("127.0.0.1" if family == socket.AF_INET else "::1", sock.getsockname()[1]))


async def test_the_engine_is_asked_for_no_compression_and_the_client_told_to_buffer_nothing(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    async with gate.post(headers={"Accept-Encoding": "gzip, br"}) as response:
        await response.read()

    assert "accept-encoding" not in engine.headers[-1]
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers
