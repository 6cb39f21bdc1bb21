"""The body of an engine's answer, handed on as it is read: no task is woken for a piece of it.

Stands between the engine's connection and aiohttp's own protocol while a body comes. HTTP is still read by aiohttp's
parser: this one only takes each piece out of it at once. Must not know what is in a body, nor where it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp


class Relay(asyncio.Protocol):
    """One body on its way."""

    def __init__(
        self,
        upstream: aiohttp.ClientResponse,
        take: Callable[[bytes], bool],
        caught_up: Callable[[], Awaitable[None]],
        taken_bytes: int = 0,
    ) -> None:
        """`take` is called with each piece, and tells whether its reader is behind; `caught_up` waits until it is not.

        `taken_bytes` of the body were read before. While the reader is behind nothing is read from the engine.
        """
        self._content = upstream.content
        self._take = take
        self._caught_up = caught_up
        self._loop = asyncio.get_running_loop()
        self._behind = self._lost = False
        self._taken_bytes = taken_bytes
        self._problem: Exception | None = None
        self._turn: asyncio.Future[None] | None = None
        connection = upstream.connection
        # A short answer was whole with its head: then the connection serves others already.
        self._transport = None if connection is None else connection.transport
        protocol = None if connection is None else connection.protocol
        self._parser = asyncio.Protocol() if protocol is None else protocol

    async def run(self) -> bool:
        """Hand on the whole body; False when the engine broke off.

        Raises:
            Exception: whatever `take` raises.
        """
        if self._transport is not None:
            self._transport.set_protocol(self)
        try:
            while True:
                self._hand_on()
                if self._problem is not None:
                    raise self._problem
                if self._behind:
                    await self._wait_for_reader()
                elif self._content.is_eof():
                    return True
                elif self._is_broken():
                    return False
                else:
                    self._turn = self._loop.create_future()
                    await self._turn
        finally:
            self._step_aside()

    # The engine's connection speaks.

    def data_received(self, data: bytes) -> None:
        """Bytes of the body came, framed."""
        self._parser.data_received(data)
        content = self._content
        if content.total_bytes > self._taken_bytes and not self._behind:
            self._hand_on()
        if content.is_eof():
            # From here on the connection may be another call's.
            self._step_aside()
            self._wake()
        elif self._behind or self._problem is not None or content.exception() is not None:
            self._wake()

    def eof_received(self) -> None:
        """The engine sends no more: what that means shows once the connection is lost."""
        self._parser.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is gone, or the call was cut."""
        self._parser.connection_lost(exc)
        self._lost = True
        self._hand_on()
        self._wake()

    def pause_writing(self) -> None:
        """A long request is still on its way up."""
        self._parser.pause_writing()

    def resume_writing(self) -> None:
        """It goes on."""
        self._parser.resume_writing()

    # How it comes about.

    def _hand_on(self) -> None:
        """Hand on what has been read, until the reader is behind."""
        content = self._content
        try:
            # Reading lets the parser go on with what it held back, so there may be more at once.
            while content.total_bytes > self._taken_bytes and not self._behind and content.exception() is None:
                piece = content.read_nowait()
                self._taken_bytes += len(piece)
                self._behind = self._take(piece)
            if self._behind and self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
        except Exception as error:  # noqa: BLE001  # raised again where the call waits
            self._problem = error

    async def _wait_for_reader(self) -> None:
        await self._caught_up()
        self._behind = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _is_broken(self) -> bool:
        return self._lost or self._transport is None or self._content.exception() is not None

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def _step_aside(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None and not self._lost:
            transport.set_protocol(self._parser)
