"""The link to Sluice's own engine: polls `/state` over the Unix socket and tells the admission what it means.

Owns the poll. What its outcome says about the engine's life is `life`'s to judge. Must not decide about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sluice_engine import codec
from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import Terms
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.life import EngineLife
from sluice_sidecar.engines.connection import CONNECT_TIMEOUT_S, EngineConnection
from sluice_sidecar.engines.exposition import without_process_metrics
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.engines.scrape import Scrape
from sluice_sidecar.errors import EngineUnreachable, Reason

log = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 1.0
# One scrape a second at most reaches the engine; who asks meanwhile, or for longer than this, gets the last one.
_METRICS_KEPT_US = 1_000_000
_METRICS_PATIENCE_S = 1.0
_MEANINGS = {429: Reason.ENGINE_OVERLOADED, 503: Reason.ENGINE_LOADING, 504: Reason.DEADLINE_MISSED}


class SluiceEngine(EngineLink):
    """Sluice's own engine as the gate sees it."""

    keeps_steps = True

    def __init__(self, socket_path: str, admission: Admission, clock: Callable[[], int], interval_us: int) -> None:
        super().__init__(EngineConnection.to_socket(socket_path), admission, clock, interval_us, EngineLife())
        self._scrape = Scrape(self._connection, clock, patience_s=_METRICS_PATIENCE_S)
        self._scraped_us = 0
        self._metrics_lock = asyncio.Lock()

    async def close(self) -> None:
        """Close every connection."""
        await self._scrape.close()
        await super().close()

    def configure(self, slo: SLOConfig) -> None:
        """Another promise: the engine reads it for itself."""

    async def poll(self) -> None:
        """Read the state once and act on it."""
        asked_us = self._clock()
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                document = await self.get_json("/state")
            # A state of many requests is read in three strides, so that tokens pass between them.
            await asyncio.sleep(0)
            state = codec.decode(EngineState, document, "state", ignore_unknown=True)
        except EngineUnreachable as error:
            if not error.refused:
                self.life.unanswered(asked_us)
            elif self.life.refused(asked_us, self._clock()):
                log.warning("engine refuses connections")
        except TimeoutError:
            self.life.unanswered(asked_us)
        except InvalidConfig as error:
            self.life.unreadable()
            log.error("engine state unreadable", extra={"problem": str(error)})  # noqa: TRY400  # our own one line
        else:
            await asyncio.sleep(0)
            self._take(state, asked_us)
        self._admission.set_unavailable(self.unavailable(), self._clock())

    @staticmethod
    def meaning_of(status: int) -> Reason | None:
        """What a status of the engine's means; None: it is the client's to read."""
        return _MEANINGS.get(status)

    @staticmethod
    def body_for_engine(content: bytes, terms: Terms) -> bytes:
        """The body as it came: class and tenant go in headers, and a priority means here what it means there."""
        del terms
        return content

    async def count_tokens(self, body: bytes) -> int | None:
        """The exact length of a prompt; None when the engine cannot tell, and will say why itself."""
        answer = await self._connection.post_json("/tokenize", body, within_s=CONNECT_TIMEOUT_S)
        count = answer.get("count") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None

    async def metrics_page(self) -> bytes:
        """The engine's metrics, without those of its process; at most one scrape a second, old ones when it is slow."""
        async with self._metrics_lock:
            now_us = self._clock()
            if now_us - self._scraped_us >= _METRICS_KEPT_US:
                try:
                    self._scraped_us = await self._scrape.next(now_us) or self._scraped_us
                except EngineUnreachable:
                    self._scraped_us, self._scrape.page = now_us, b""  # a dead engine has no numbers
            return without_process_metrics(self._scrape.page)

    def _take(self, state: EngineState, asked_us: int) -> None:
        was_refusing = self.life.refuses and self.life.state is not None
        as_of_us = self.life.answered(state, asked_us)
        if self.life.state is not state:
            log.error("engine state of another version", extra={"schema_version": state.schema_version})
            return
        if was_refusing:
            log.info("engine answers again", extra={"boot_id": state.boot_id, "phase": state.phase})
        if as_of_us is not None:
            self._admission.observe(state, as_of_us, self._clock())
