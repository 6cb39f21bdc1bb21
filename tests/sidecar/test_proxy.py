from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config
from sluice_sidecar import proxy
from sluice_sidecar.drain import DrainPhase
from sluice_sidecar.web import watch


def outcomes(gate: RunningGate) -> dict[str, float]:
    """Ended requests by outcome."""
    (family,) = gate.gate.metrics.requests.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}


async def read(gate: RunningGate, **request: Any) -> tuple[int, str]:
    """Status and body; the body as far as it came when its framing broke."""
    async with gate.post(**request) as response:
        return response.status, (await response.read()).decode()


async def test_a_stream_arrives_whole_and_in_order(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(tokens=5)

    status, body = await read(gate)

    assert status == 200
    assert body.count("tok") == 5
    assert body.endswith("data: [DONE]\n\n")
    await empty(gate.gate)
    assert outcomes(gate) == {"completed": 1}


async def test_once_the_drain_is_announced_every_answer_ends_its_connection(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with running_gate(engine, socket_dir, endpoint_propagation_us=600_000_000) as gate:
        assert await _connections(gate) == [None] * 4

        drain = gate.gate.drain.start()

        assert gate.gate.drain.phase is DrainPhase.ANNOUNCED
        assert await _connections(gate) == ["close"] * 4
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)


async def _connections(gate: RunningGate) -> list[str | None]:
    """What is said of the connection by a stream, a whole answer, the models and an unknown path."""
    said = []
    for stream in (True, False):
        async with gate.post(stream=stream) as response:
            assert (response.status, bool(await response.read())) == (200, True)
            said.append(response.headers.get("Connection"))
    for path in ("/v1/models", "/nope"):
        async with gate.client.get(gate.url + path) as response:
            said.append(response.headers.get("Connection"))
    return said


async def test_a_whole_answer_arrives_with_its_length(gate: RunningGate) -> None:
    async with gate.post(stream=False) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 3
        assert int(response.headers["Content-Length"]) > 0
    await empty(gate.gate)
    assert outcomes(gate) == {"completed": 1}


async def test_a_whole_answer_too_large_to_hold_is_copied(
    gate: RunningGate, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_WHOLE_BYTES", 1_000)
    engine.script = Script(tokens=300_000)

    async with gate.post(stream=False) as response:
        body = await response.json()

    assert len(body["choices"][0]["message"]["content"]) == 900_000
    await empty(gate.gate)


async def test_headers_go_out_as_soon_as_the_engine_has_queued_the_request(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={0: hold})

    async with gate.post() as response:
        assert response.status == 200
        assert b"assistant" in await response.content.readany()
        # The role is no token: the first one has not been seen yet.
        assert gate.gate.recorder.measured(preemptions_per_minute=0, kv_usage_percent=0, now_us=0).requests == 0
        hold.set()
        await response.read()


@pytest.mark.parametrize("partial", [False, True], ids=["between-events", "in-the-middle-of-an-event"])
async def test_an_engine_killed_mid_stream_ends_in_an_error_event(
    gate: RunningGate, engine: ScriptedEngine, *, partial: bool
) -> None:
    engine.script = Script(tokens=5, die_before_token=2, partial_event=partial)

    status, body = await read(gate)

    events = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
    assert status == 200
    assert "[DONE]" not in body
    assert body.count("tok") == 2
    assert [json.loads(event).get("error", {}).get("code") for event in events] == [None] * 3 + ["engine_failed"]
    await empty(gate.gate)
    assert outcomes(gate) == {"failed": 1}


async def test_an_engine_killed_in_a_whole_answer_is_a_502(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(die_before_token=0)

    status, body = await read(gate, stream=False)

    assert status == 502
    assert json.loads(body)["error"]["code"] == "engine_failed"
    await empty(gate.gate)


async def test_an_engine_killed_in_a_copied_answer_breaks_the_framing(
    gate: RunningGate, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_WHOLE_BYTES", 1_000)
    engine.script = Script(tokens=300_000, die_before_token=0)

    with pytest.raises(Exception, match=r"payload|disconnected|reset|Connection"):
        await read(gate, stream=False)
    await empty(gate.gate)
    assert outcomes(gate) == {"failed": 1}


async def test_killing_the_engine_ends_every_stream_and_frees_everything(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    engine.script = Script(tokens=5, hold_token={1: asyncio.Event()})
    streams = [asyncio.create_task(read(gate)) for _ in range(4)]
    await until(lambda: len(engine.bodies) == 4)

    await engine.kill()

    bodies = [body for _, body in await asyncio.gather(*streams)]
    assert all('"error"' in body and "[DONE]" not in body for body in bodies)
    await empty(gate.gate)
    await until(lambda: gate.gate.not_ready() == "engine_dead")


async def test_an_engine_killed_before_it_answered_is_a_502(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(hold_headers=asyncio.Event())
    stream = asyncio.create_task(read(gate))
    await until(lambda: bool(engine.bodies))

    await engine.kill()

    status, body = await stream
    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
    await empty(gate.gate)


WINDOWS = [
    pytest.param({}, Script(hold_headers=asyncio.Event()), id="before-the-engine-answered"),
    pytest.param({}, Script(hold_token={0: asyncio.Event()}), id="before-the-first-token"),
    pytest.param({}, Script(hold_token={2: asyncio.Event()}), id="mid-stream"),
    pytest.param({"stream": False}, Script(hold_token={0: asyncio.Event()}), id="while-a-whole-answer-is-made"),
]


@pytest.mark.parametrize(("request_", "script"), WINDOWS)
async def test_a_client_that_leaves_frees_everything(
    gate: RunningGate, engine: ScriptedEngine, request_: dict[str, Any], script: Script
) -> None:
    engine.script = script
    client = asyncio.create_task(read(gate, **request_))
    await until(lambda: bool(engine.active))

    client.cancel()

    await until(lambda: engine.aborted == 1)
    await empty(gate.gate)
    assert engine.active == {}
    assert outcomes(gate) == {"client_left": 1}


async def test_a_client_that_leaves_while_it_sends_its_body_frees_everything(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    _, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{")
    await until(lambda: gate.gate.held.held_bytes == 1)

    writer.transport.abort()

    await empty(gate.gate)
    assert engine.bodies == []


async def test_a_client_that_leaves_the_door_makes_room_for_the_next(engine: ScriptedEngine, socket_dir: Path) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=60_000_000, ttft_us=600_000_000)) as gate:
        running = [asyncio.create_task(read(gate)) for _ in range(4)]
        await until(lambda: len(engine.bodies) == 4)
        leaver, stayer = (asyncio.create_task(read(gate)) for _ in range(2))
        await until(lambda: gate.gate.admission.waiting == 2)

        leaver.cancel()
        await until(lambda: gate.gate.admission.waiting == 1)
        hold.set()

        assert (await stayer)[0] == 200
        await asyncio.gather(*running)
        await empty(gate.gate)
        assert len(engine.bodies) == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stalls_is_cut_and_its_request_given_up(
    engine: ScriptedEngine, socket_dir: Path, *, stream: bool
) -> None:
    engine.script = Script(tokens=100_000 if stream else 5_000, text="tok" * 1_000)
    async with running_gate(engine, socket_dir, stall_timeout_us=100_000) as gate:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (gate.host, gate.port))
        body = b'{"messages": [], "max_tokens": 2, "stream": %s}' % (b"true" if stream else b"false")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        await loop.sock_sendall(sock, head + body)

        await until(lambda: outcomes(gate) == {"stalled": 1})

        await empty(gate.gate)
        await until(lambda: not engine.active)
        assert engine.aborted == stream, "a whole answer had been made before"
        sock.close()


async def test_silence_is_filled_with_comments_between_whole_events(
    gate: RunningGate, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PING_AFTER_US", 20_000)
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})

    async with gate.post() as response:
        seen = b""
        while b": ping\n\n" not in seen:
            seen += await response.content.readany()
        hold.set()
        body = seen + await response.read()

    assert body.replace(b": ping\n\n", b"").count(b"\n\n") == 6
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_drain_lets_every_stream_end_and_refuses_what_is_new(
    gate: RunningGate, engine: ScriptedEngine, socket_dir: Path
) -> None:
    hold = asyncio.Event()
    engine.script = Script(tokens=4, hold_token={2: hold})
    streams = [asyncio.create_task(read(gate)) for _ in range(4)]
    await until(lambda: len(engine.active) == 4)

    drained = gate.gate.drain.start()
    await until(lambda: gate.gate.drain.phase is DrainPhase.REFUSING)
    async with gate.post() as response:
        assert response.status == 503
        assert response.headers["x-sluice-reason"] == "draining"
        assert response.headers["Connection"] == "close"
    async with gate.client.get(f"{gate.url}/readyz") as response:
        assert (response.status, await response.text()) == (503, "draining\n")
    assert not (socket_dir / "drained").exists()
    hold.set()

    assert [body.endswith("data: [DONE]\n\n") for _, body in await asyncio.gather(*streams)] == [True] * 4
    await drained
    assert (socket_dir / "drained").exists()
    async with gate.post() as response:
        assert response.status == 503


async def test_while_endpoints_forget_the_pod_it_still_serves(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, endpoint_propagation_us=60_000_000) as gate:
        gate.gate.drain.start()

        async with gate.client.get(f"{gate.url}/readyz") as response:
            assert response.status == 503
        assert (await read(gate))[0] == 200
        assert gate.gate.drain.phase is DrainPhase.ANNOUNCED
        gate.gate.drain.start().cancel()


async def test_those_at_the_door_are_told_when_the_drain_begins_to_refuse(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=60_000_000, ttft_us=600_000_000)) as gate:
        running = [asyncio.create_task(read(gate)) for _ in range(4)]
        await until(lambda: len(engine.bodies) == 4)
        waiting = asyncio.create_task(read(gate))
        await until(lambda: gate.gate.admission.waiting == 1)

        drained = gate.gate.drain.start()

        status, body = await waiting
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        hold.set()
        await asyncio.gather(*running)
        await drained


async def test_what_outlives_the_drain_ends_in_an_error_and_not_in_a_cut(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with running_gate(engine, socket_dir, drain_timeout_us=50_000) as gate:
        engine.script = Script(tokens=4, hold_token={2: asyncio.Event()})
        stream, whole = asyncio.create_task(read(gate)), asyncio.create_task(read(gate, stream=False))
        await until(lambda: len(engine.active) == 2)
        engine.script = Script(hold_headers=asyncio.Event())
        unanswered = asyncio.create_task(read(gate))
        await until(lambda: len(engine.active) == 3)

        await gate.gate.drain.start()

        _, body = await stream
        assert json.loads(body.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert body.count("tok") == 2
        for task in (whole, unanswered):
            status, body = await task
            assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        await empty(gate.gate)
        assert outcomes(gate) == {"drained": 3}
        assert (socket_dir / "drained").exists()
