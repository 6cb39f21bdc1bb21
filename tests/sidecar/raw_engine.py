"""An engine of bytes: it answers a generation with what a test gives it, segment by segment, framing and all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.scripted_engine import ready_state
from sluice_engine import codec

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str = "tok") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


LAST = b"0\r\n\r\n"


@dataclass
class RawEngine:
    """Serves on `socket_path` while inside `running()`."""

    socket_path: Path
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
    """What is done with a generation; it may close the connection."""
    generations: int = 0
    connections: list[asyncio.StreamWriter] = field(default_factory=list)
    """Those over which a generation came."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RawEngine]:
        server = await asyncio.start_unix_server(self._serve, str(self.socket_path))
        try:
            yield self
        finally:
            server.close()
            for writer in self.connections:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
            if head.startswith(b"GET"):
                page = codec.to_json(ready_state()).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
                    len(page), page,
                ))  # fmt: skip
                continue
            self.generations += 1
            if writer not in self.connections:
                self.connections.append(writer)
            assert self.answer is not None
            await self.answer(writer)
