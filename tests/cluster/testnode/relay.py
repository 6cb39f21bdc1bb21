"""A relay of TCP connections that can fall silent: what a lost route or a dead balancer does to those that are open."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Relay:
    """Passes bytes on, both ways, until it is told to swallow those of the connections that are open then."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._silence = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0
        """Where it listens on this machine."""

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """The time in which it runs, in a thread of its own."""
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(listening), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)
            self._loop.close()

    def fall_silent(self) -> None:
        """From now on nothing comes through the connections that are open; they stay open, and new ones work."""

        def swallow() -> None:
            self._silence.set()
            self._silence = asyncio.Event()

        self._loop.call_soon_threadsafe(swallow)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Nothing else would hold it while its connection is silent.
        self._serving.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silence = self._silence
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(
                _pass_on(reader, target_writer, silence), _pass_on(target_reader, writer, silence)
            )  # fmt: skip
        finally:
            for one in (writer, target_writer):
                one.transport.abort()
                with contextlib.suppress(OSError):
                    await one.wait_closed()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, silence: asyncio.Event) -> None:
    try:
        while read := await source.read(65536):
            if not silence.is_set():
                sink.write(read)
                await sink.drain()
        if not silence.is_set():
            sink.write_eof()
    except OSError:
        sink.close()
