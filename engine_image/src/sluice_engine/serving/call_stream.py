"""One call's emissions on their way from the engine's thread to the handler that writes the answer.

All of it runs in the event loop. It is not bounded by itself: a request emits at most `max_tokens` times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from sluice_engine.core.emissions import Emission
from sluice_engine.core.request import Outcome
from sluice_engine.errors import DeadlineMissed, RequestError


class CallStream:
    """The emissions of one call's requests, as the event loop receives them. Leaving it aborts what still runs."""

    def __init__(self, request_ids: Sequence[str], abort: Callable[[str, Outcome], None]) -> None:
        self._abort = abort
        self._open = set(request_ids)
        self._emissions: list[Emission] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Emission]:
        """The emissions since the last call, at least one.

        Raises:
            RequestError: the engine refused the requests, or ended.
        """
        while not self._emissions:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        emissions, self._emissions = self._emissions, []
        return emissions

    async def begun(self) -> None:
        """Return once there is something to tell that is no missed deadline.

        Raises:
            RequestError: a request ran out of time before anything was told, or as `next`.
        """
        emissions = await self.next()
        self._emissions[:0] = emissions
        if any(emission.outcome is Outcome.EXPIRED for emission in emissions):
            raise DeadlineMissed

    def stop(self, request_id: str) -> None:
        """A stop string was found: the request has its answer, the engine need not go on."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id, Outcome.STOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abort whatever has not ended: the caller has its answer, or has left."""
        for request_id in self._open:
            self._abort(request_id, Outcome.ABORTED)

    def deliver(self, emission: Emission) -> None:
        """Take one emission; the service calls this in the event loop."""
        if emission.outcome is not None:
            self._open.discard(emission.request.id)
        self._emissions.append(emission)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End all of it; the service calls this in the event loop."""
        self._open.clear()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
