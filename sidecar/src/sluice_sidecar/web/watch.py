"""Writing one answer: a slow reader is cut after the stall timeout, a silent stream is kept alive by comments.

Owns the write side of one response, with one timer a stream, not one a write. Must not know what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from aiohttp import HttpVersion11, web

# A comment keeps idle gateways from cutting a silent stream, and finds a client that vanished without a word.
PING_AFTER_US = 15_000_000
_PING = b": ping\n\n"


class StreamHead(web.StreamResponse):
    """A response whose head waits for what follows it, instead of being a write and a packet of its own."""

    _send_headers_immediately = False


class StreamWatch:
    """Writes one answer under watch: a write that takes too long cuts the client, silence is filled with pings."""

    def __init__(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        clock: Callable[[], int],
        stall_timeout_us: int,
        *,
        pings: bool = True,
    ) -> None:
        self.stalled = False
        self._request = request
        self.response = response
        self._protocol = request.protocol
        self._chunked = False
        self._clock = clock
        self._stall_timeout_us = stall_timeout_us
        self._pings = pings
        self._writing_since_us: int | None = None
        self._written_us = clock()
        self._ping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._tick_s = min(PING_AFTER_US, stall_timeout_us) / 4e6
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    async def begin(self, first: bytes = b"") -> None:
        """Send the head, with `first` of the body in one write where that is there already.

        A body of unknown length is framed in chunks, where the client's version has them.
        """
        if self.response.content_length is None and self._request.version >= HttpVersion11:
            self.response.enable_chunked_encoding()
        await self.response.prepare(self._request)
        self._chunked = self.response.chunked
        if first:
            self._writing_since_us = self._clock()
            await self.response.write(first)
            self._writing_since_us = None
        else:
            self._request.writer.send_headers()

    def send(self, chunk: bytes, now_us: int) -> bool:
        """Send a chunk of an answer whose head is out; True when the client is behind.

        Then `caught_up` is to be awaited before more is sent.

        Raises:
            ConnectionError: the client has left.
        """
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._written_us = now_us
        if chunk:
            # As the response's writer would, without a coroutine for each.
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)
        if not self._protocol.writing_paused:
            return False
        self._writing_since_us = now_us
        return True

    async def caught_up(self) -> None:
        """Wait until the client is not behind any more."""
        await self._request.writer.drain()
        self._written_us = self._clock()
        self._writing_since_us = None

    async def write(self, chunk: bytes, now_us: int) -> None:
        """Send a chunk, and wait while the client is behind."""
        if self.send(chunk, now_us):
            await self.caught_up()

    async def finish(self, last: bytes = b"") -> None:
        """Send the end of the body, and `last` of it in the same write."""
        self._writing_since_us = self._clock()
        await self.response.write_eof(last)

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _tick(self) -> None:
        now_us = self._clock()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if self._writing_since_us is not None:
            if now_us - self._writing_since_us >= self._stall_timeout_us:
                self.stalled = True
                if self._request.transport is not None:
                    self._request.transport.abort()
        elif self._pings and self.response.prepared and now_us - self._written_us >= PING_AFTER_US:
            self._written_us = now_us
            self._ping = self._loop.create_task(self._send_ping())

    async def _send_ping(self) -> None:
        with suppress(ConnectionError):
            await self.response.write(_PING)
