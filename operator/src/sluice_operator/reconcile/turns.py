"""The line of services that want to be looked at: so many at once, and whoever is waited for goes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sluice_operator.reconcile.service import Service

AT_ONCE = 8
"""After a start or a resync all want to be looked at: without a line, the memory of all would be needed together."""


class Turns:
    """Places among those that are looked at."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def of(self, service: Service) -> AsyncIterator[None]:
        """A place among those that are looked at; at once for one that is news, or becomes so while it waits."""
        place = asyncio.ensure_future(self.places.acquire())
        news = asyncio.ensure_future(service.news.wait())
        try:
            await asyncio.wait((place, news), return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                place.cancel()
            service.news.clear()
            service.hope.clear()
            yield
        finally:
            news.cancel()
            if not place.cancel() and not place.cancelled():
                self.places.release()
