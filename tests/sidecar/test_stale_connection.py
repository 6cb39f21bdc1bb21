"""A kept connection to the engine that has ended: a request goes again only where nothing of it had been sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import until
from sluice_sidecar.engines.connection import EngineConnection
from sluice_sidecar.errors import EngineUnreachable

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Engine(asyncio.Protocol):
    """Answers what comes whole, unless told to end the connection instead."""

    ends_at_next = False

    def __init__(self, engines: list[Engine]) -> None:
        self.received = b""
        engines.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.ends_at_next:
            self.transport.abort()
        elif self.received.endswith(b"body"):
            self.transport.write(ANSWER)


async def post(connection: EngineConnection, size: int = 4) -> bytes:
    async with connection.request("POST", "/v1/completions", body=b"body".rjust(size)) as response:
        return await response.read()


@pytest.fixture
async def connection(socket_dir: Path, engines: list[Engine]) -> AsyncIterator[EngineConnection]:
    connection = EngineConnection.to_socket(str(socket_dir / "e.sock"))
    yield connection
    await connection.close()


@pytest.fixture
async def engines(socket_dir: Path) -> Any:
    engines: list[Engine] = []
    server = await asyncio.get_running_loop().create_unix_server(lambda: Engine(engines), str(socket_dir / "e.sock"))
    yield engines
    server.close()
    for engine in engines:
        engine.transport.abort()


def ending_before_the_first_byte(connection: EngineConnection, times: int) -> Callable[..., Any]:
    """The pool's own way to hand out a connection, which has ended by the time it is written to."""
    connect, left = connection._session.connector.connect, [times]  # type: ignore[union-attr]

    async def handed_out(*args: Any, **kwargs: Any) -> Any:
        taken: Any = await connect(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            assert taken.transport is not None
            taken.transport.close()
        return taken

    return handed_out


async def test_one_that_ended_before_the_first_byte_is_replaced(
    engines: list[Engine], connection: EngineConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await post(connection) == b"ok"
    monkeypatch.setattr(connection._session.connector, "connect", ending_before_the_first_byte(connection, 1))

    assert await post(connection) == b"ok"

    assert [engine.received.count(b"POST") for engine in engines] == [1, 1]


async def test_it_is_tried_again_once_and_not_for_ever(
    engines: list[Engine], connection: EngineConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection._session.connector, "connect", ending_before_the_first_byte(connection, 9))

    with pytest.raises(EngineUnreachable) as raised:
        await post(connection)

    assert not raised.value.refused
    assert sum(engine.received.count(b"POST") for engine in engines) == 0


@pytest.mark.parametrize("size", [4, 30_000, 900_000], ids=["short", "long", "longer-than-any-buffer"])
async def test_one_that_ends_on_a_request_that_was_sent_is_not_asked_again(
    engines: list[Engine], connection: EngineConnection, size: int
) -> None:
    assert await post(connection) == b"ok"
    engines[0].ends_at_next = True

    with pytest.raises(EngineUnreachable):
        await post(connection, size)

    assert sum(engine.received.count(b"POST") for engine in engines) == 2, (
        "the first request, and the one that was lost"
    )


async def test_a_connection_is_kept_and_used_again(engines: list[Engine], connection: EngineConnection) -> None:
    for _ in range(3):
        assert await post(connection) == b"ok"

    assert [engine.received.count(b"POST") for engine in engines] == [3]
    await connection.close()
    await until(engines[0].transport.is_closing)
