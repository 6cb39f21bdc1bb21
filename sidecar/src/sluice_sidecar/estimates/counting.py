"""Exact lengths of prompts, asked of the engine: few at a time, few in line, and not for long.

Counting is the engine's CPU, and who waits for a count holds a body: a burst of prompts near the limit must neither
slow its steps nor fill the gate. Must not know what a count is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sluice_sidecar.errors import Refusal, Refused

MOST_AT_ONCE = 2
MOST_IN_LINE = 8
# One count is given as long by the link to the engine, so that a body waits twice this at most.
TURN_S = 2.0


class ExactCounts:
    """The line for `count`, which asks the engine; `busy` is asked for the refusal of one that finds it too long."""

    def __init__(self, count: Callable[[bytes], Awaitable[int | None]], busy: Callable[[], Refusal]) -> None:
        self._count = count
        self._busy = busy
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self.in_line = 0

    async def count(self, question: bytes) -> int | None:
        """The length of a prompt; None when the engine cannot tell.

        Raises:
            Refused: too many wait already, or it was nobody's turn in time.
        """
        if self.in_line >= MOST_IN_LINE:
            raise Refused(self._busy())
        self.in_line += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise Refused(self._busy()) from error
        finally:
            self.in_line -= 1
        try:
            return await self._count(question)
        finally:
            self._turn.release()
