"""The one scrape of an engine's metrics page: never two at once, given up when it is slow, then left alone for a while.

Owns the page that was last read. Must not know what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from sluice_sidecar.engines.connection import OK, EngineConnection
from sluice_sidecar.errors import EngineUnreachable

# A page may wait for the end of a long step; meanwhile the state in use grows old, and no second one is asked for.
TIMEOUT_S = 10.0
BACKOFF_US = 5_000_000
# A poll waits this long for the page that is on its way.
POLL_PATIENCE_S = 0.15


class Scrape:
    """Pages, one after the other."""

    def __init__(
        self, connection: EngineConnection, clock: Callable[[], int], *, patience_s: float = POLL_PATIENCE_S
    ) -> None:
        """`patience_s` is how long each call waits for the page that is on its way."""
        self._patience_s = patience_s
        self._connection = connection
        self._clock = clock
        self._due_us = 0
        self._task: asyncio.Task[bytes] | None = None
        self._asked_us = 0
        self.page = b""
        """The last that came."""
        self.problem = ""
        """Why none came."""

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, EngineUnreachable, TimeoutError):
                await self._task

    async def next(self, now_us: int) -> int | None:
        """When the page was asked for that has come; None while it has not, or is left alone.

        Raises:
            EngineUnreachable: nobody listens.
        """
        if self._task is None:
            if now_us < self._due_us:
                return None
            self._asked_us = now_us
            self._task = asyncio.create_task(self._fetch())
        await asyncio.wait((self._task,), timeout=self._patience_s)
        if not self._task.done():
            return None
        task, self._task = self._task, None
        try:
            self.page, self.problem = task.result(), ""
        except (TimeoutError, EngineUnreachable) as error:
            if isinstance(error, EngineUnreachable) and error.refused:
                raise
            self._due_us = self._clock() + BACKOFF_US
            self.problem = f"no page of metrics: {str(error) or 'too slow'}"
            return None
        return self._asked_us

    async def _fetch(self) -> bytes:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._connection.request("GET", "/metrics") as answer:
                if answer.status != OK:
                    raise EngineUnreachable(f"its /metrics says {answer.status}", refused=False)
                return await answer.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(str(error), refused=False) from error
