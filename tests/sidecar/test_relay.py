from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import cast

import pytest
from aiohttp.http_writer import StreamWriter

from sidecar.raw_engine import DONE, HEAD, LAST, RawEngine, chunk, event
from sidecar.running import RunningGate, empty, running_gate, until

BODY = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": true}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@pytest.fixture
async def raw(socket_dir: Path) -> AsyncIterator[RawEngine]:
    async with RawEngine(socket_dir / "engine.sock").running() as engine:
        yield engine


@pytest.fixture
async def relayed(raw: RawEngine, socket_dir: Path) -> AsyncIterator[RunningGate]:
    async with running_gate(raw, socket_dir) as gate:
        yield gate


def sends(raw: RawEngine, *segments: bytes, close: bool = False) -> None:
    """Each generation is answered with these, each seen by the gate before the next is sent."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for segment in segments:
            writer.write(segment)
            await writer.drain()
            await asyncio.sleep(0.0002)
        if close:
            writer.close()

    raw.answer = answer


async def outcome(gate: RunningGate) -> dict[str, float]:
    """How the calls ended, once nothing is held any more."""
    await empty(gate.gate)
    (family,) = gate.gate.metrics.requests.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}


async def read(gate: RunningGate) -> bytes:
    async with gate.post() as response:
        assert response.status == 200
        body: bytes = await response.read()
        return body


def reading(gate: RunningGate) -> bool:
    """Whether the one call's answer is read from the engine."""
    upstreams = [call.upstream for call in gate.gate._calls if call.upstream is not None]
    if not upstreams or upstreams[0].connection is None:
        return True
    transport = upstreams[0].connection.transport
    return cast("asyncio.ReadTransport", transport).is_reading()


WHOLE = event("a") + event("b") + DONE
GOOD = [
    pytest.param([HEAD + chunk(event("a")) + chunk(event("b") + DONE) + LAST], id="all-in-one-segment"),
    pytest.param([HEAD + chunk(event("a")), chunk(event("b")), chunk(DONE) + LAST], id="head-with-the-first-bytes"),
    pytest.param([HEAD, chunk(event("a")), chunk(event("b")), chunk(DONE), LAST], id="each-for-itself"),
    pytest.param([HEAD, chunk(event("a"), b";x=1"), chunk(event("b") + DONE, b';y="z"') + LAST], id="chunk-extensions"),
    pytest.param([HEAD, chunk(WHOLE), b"0\r\nX-Took: 5\r\nX-More: 6\r\n\r\n"], id="trailers"),
    pytest.param([bytes([byte]) for byte in HEAD + chunk(WHOLE) + LAST], id="byte-by-byte"),
    pytest.param([HEAD] + [chunk(bytes([byte])) for byte in WHOLE] + [LAST], id="a-chunk-a-byte"),
]


@pytest.mark.parametrize("segments", GOOD)
async def test_a_stream_arrives_however_it_is_cut_and_framed(
    relayed: RunningGate, raw: RawEngine, segments: list[bytes]
) -> None:
    sends(raw, *segments)

    for _ in range(4):
        assert await read(relayed) == WHOLE

    assert await outcome(relayed) == {"completed": 4}
    # The poll of the engine has one at times.
    assert len(raw.connections) <= 2, "a good end leaves the connection to the next call"


UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


async def test_a_stream_that_ends_with_its_connection_is_whole(relayed: RunningGate, raw: RawEngine) -> None:
    sends(raw, UNTIL_CLOSED + event("a"), event("b"), DONE, close=True)

    assert await read(relayed) == WHOLE
    assert await outcome(relayed) == {"completed": 1}


BROKEN = [
    pytest.param([HEAD, chunk(event("a")), b"40\r\ndata: {"], id="mid-chunk"),
    pytest.param([HEAD + chunk(event("a")) + b"40\r\ndata: {"], id="mid-chunk-in-the-first-segment"),
    pytest.param([HEAD, chunk(event("a"))], id="between-chunks"),
    pytest.param([HEAD, chunk(event("a")), b"zz\r\n"], id="no-chunk-at-all"),
    pytest.param([UNTIL_CLOSED, event("a")], id="unframed"),
]


@pytest.mark.parametrize("segments", BROKEN)
async def test_an_engine_that_breaks_off_is_told_of_in_an_event(
    relayed: RunningGate, raw: RawEngine, segments: list[bytes]
) -> None:
    sends(raw, *segments, close=True)

    body = await read(relayed)

    first, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert first + b"\n\n" == event("a")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert await outcome(relayed) == {"failed": 1}


@pytest.mark.parametrize("first", [0, 1, 2, 3])
async def test_wherever_it_is_cut_whole_events_come_and_then_the_end_or_an_error(
    relayed: RunningGate, raw: RawEngine, first: int
) -> None:
    wire = HEAD + chunk(event("a")) + chunk(event("b") + DONE) + LAST
    for cut in range(first, len(wire) + 1, 4):
        sends(raw, wire[:cut], close=True)

        async with relayed.post() as response:
            body = await response.read()

        if cut < len(HEAD):
            assert (response.status, json.loads(body)["error"]["code"]) == (502, "engine_failed"), cut
            continue
        if body != WHOLE:
            assert body.endswith(b"\n\n"), cut
            *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
            assert WHOLE.startswith(b"".join(one + b"\n\n" for one in events)), cut
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed", cut
        assert body == WHOLE or cut < len(wire)
    await empty(relayed.gate)


async def test_an_unframed_stream_that_is_cut_does_not_end_as_if_it_were_whole(
    relayed: RunningGate, raw: RawEngine
) -> None:
    sends(raw, UNTIL_CLOSED, event("a"))

    async with relayed.post(headers={"x-sluice-timeout-ms": "1500"}) as response:
        first, last = (await response.read()).removesuffix(b"\n\n").split(b"\n\n")

    assert first + b"\n\n" == event("a")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_missed"
    assert await outcome(relayed) == {"expired": 1}


async def test_a_reader_that_is_slow_holds_up_the_engine_and_loses_nothing(
    relayed: RunningGate, raw: RawEngine
) -> None:
    events = [event(f"{number}:" + "x" * 20_000) for number in range(150)]
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD)
        for one in events:
            writer.write(chunk(one))
            await writer.drain()
            sent += 1
        writer.write(chunk(DONE) + LAST)

    raw.answer = answer
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (relayed.host, relayed.port))
    await loop.sock_sendall(sock, REQUEST)
    # The gate reads no more, and the kernel takes no more from the engine: nothing can move.
    await until(lambda: not reading(relayed) and raw.connections[-1].transport.get_write_buffer_size() > 0)
    # 3 MB were to be sent: what the gate and the kernel hold of them is far less.
    assert sent < len(events) // 2

    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_000_000)
    reader, writer = await asyncio.open_connection(sock=sock)
    await reader.readuntil(b"\r\n\r\n")
    data = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data.append(await reader.readexactly(size))
        await reader.readexactly(2)
    writer.close()

    assert b"".join(data) == b"".join(events) + DONE
    assert await outcome(relayed) == {"completed": 1}


async def test_an_old_client_gets_the_events_unframed_and_then_the_end(relayed: RunningGate, raw: RawEngine) -> None:
    sends(raw, HEAD, chunk(event("a")), chunk(event("b") + DONE), LAST)
    reader, writer = await asyncio.open_connection(relayed.host, relayed.port)

    writer.write(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head.lower()
    assert body == WHOLE
    writer.close()
    assert await outcome(relayed) == {"completed": 1}


async def test_the_next_request_on_the_same_connection_waits_its_turn(relayed: RunningGate, raw: RawEngine) -> None:
    sends(raw, HEAD, chunk(event("a")), chunk(event("b") + DONE), LAST)
    reader, writer = await asyncio.open_connection(relayed.host, relayed.port)

    writer.write(REQUEST + REQUEST)

    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(LAST)).count(b"data: ") == 3
    writer.close()
    assert await outcome(relayed) == {"completed": 2}


async def test_head_and_end_are_no_writes_of_their_own(
    raw: RawEngine, relayed: RunningGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    send = StreamWriter._writelines

    def recorded(self: StreamWriter, chunks: Iterable[bytes]) -> None:
        written.append(b"".join(chunks))
        send(self, chunks)

    def alone(_: StreamWriter, chunk: bytes) -> None:
        pytest.fail(f"{chunk!r} is a write of its own")

    sends(raw, HEAD + chunk(event("a")), chunk(event("b")), chunk(DONE) + LAST)
    monkeypatch.setattr(StreamWriter, "_writelines", recorded)
    monkeypatch.setattr(StreamWriter, "_write", alone)

    assert await read(relayed) == WHOLE
    told = [one for one in written if event("a") in one or DONE in one]
    assert (told[0].startswith(b"HTTP/1.1 200 OK"), told[-1].endswith(chunk(DONE) + LAST)) == (True, True)
