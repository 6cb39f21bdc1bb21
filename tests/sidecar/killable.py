"""A server that a test ends as kill -9 would: its connections break, and nobody is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from aiohttp import web


class Killable(ABC):
    """Serves `app()` where `listen` says, while inside `running()`."""

    _runner: web.AppRunner | None = None

    @abstractmethod
    def app(self) -> web.Application:
        """Its routes."""

    @abstractmethod
    async def listen(self, runner: web.AppRunner) -> None:
        """Begin to take connections."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve until left."""
        await self.start()
        try:
            yield self
        finally:
            await self.kill()

    async def start(self) -> None:
        """Listen."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await self.listen(self._runner)

    async def kill(self) -> None:
        """Gone, connections included."""
        if self._runner is not None:
            for connection in self._runner.server.connections if self._runner.server else []:
                if connection.transport is not None:
                    connection.transport.abort()
            runner, self._runner = self._runner, None
            await runner.cleanup()
