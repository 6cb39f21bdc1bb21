"""The beat at which an engine is looked at: every interval, or at once when something happened to a connection.

Owns the clock of the poll and how late it is, which is the lag of the gate's own event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Beat:
    """Calls `look` again and again."""

    def __init__(self, look: Callable[[], Awaitable[None]], interval_us: int) -> None:
        self._look = look
        self._interval_s = interval_us / 1e6
        self._poke = asyncio.Event()
        self.lag_us = 0
        """How late the last look began."""

    def poke(self) -> None:
        """Look now."""
        self._poke.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._look()
            due = loop.time() + self._interval_s
            try:
                async with asyncio.timeout_at(due):
                    await self._poke.wait()
            except TimeoutError:
                self.lag_us = max(0, int((loop.time() - due) * 1e6))
            self._poke.clear()
