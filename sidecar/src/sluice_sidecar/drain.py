"""The gate's way down: announced, refusing, drained.

Owns the phase and the file `drained` that both containers' preStop hooks wait for. Must not know requests beyond their
number and how to cut them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from sluice_sidecar.config import GateConfig

log = logging.getLogger(__name__)

# Time for the error events of cut streams to leave, before the engine is let go.
_LAST_WORDS_S = 2.0


class DrainPhase(Enum):
    """One way only."""

    SERVING = "serving"
    ANNOUNCED = "announced"
    """Not ready any more, still accepting: endpoints take a while to forget the pod."""
    REFUSING = "refusing"
    """503 to what is new; streams run on."""
    DRAINED = "drained"


class Drain:
    """Runs the drain once, however often it is asked for."""

    def __init__(
        self,
        config: GateConfig,
        *,
        in_flight: Callable[[], int],
        refuse: Callable[[], None],
        cut: Callable[[], None],
    ) -> None:
        self._config = config
        self._in_flight = in_flight
        self._refuse = refuse
        self._cut = cut
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self.phase = DrainPhase.SERVING
        self.path = Path(config.run_dir) / "drained"

    def clear(self) -> None:
        """Remove what an earlier gate of this pod left."""
        with suppress(FileNotFoundError):
            self.path.unlink()

    @property
    def started(self) -> bool:
        """Whether readiness is gone."""
        return self.phase is not DrainPhase.SERVING

    def start(self) -> asyncio.Task[None]:
        """Begin, or return the drain that runs; done once everything has left."""
        if self._task is None:
            self.phase = DrainPhase.ANNOUNCED
            log.info("drain started", extra={"in_flight": self._in_flight()})
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def left(self) -> None:
        """A request ended."""
        if not self._in_flight():
            self._idle.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._config.endpoint_propagation_us + self._config.drain_timeout_us) / 1e6
        await asyncio.sleep(self._config.endpoint_propagation_us / 1e6)
        self.phase = DrainPhase.REFUSING
        self._refuse()
        try:
            async with asyncio.timeout_at(deadline):
                await self._empty()
        except TimeoutError:
            log.warning("drain timed out", extra={"in_flight": self._in_flight()})
            self._cut()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._empty()
        self.phase = DrainPhase.DRAINED
        try:
            self.path.touch()
        except OSError as error:
            log.error("drained file not written", extra={"path": str(self.path), "problem": str(error)})  # noqa: TRY400
        log.info("drained", extra={"in_flight": self._in_flight()})

    async def _empty(self) -> None:
        while self._in_flight():
            self._idle.clear()
            await self._idle.wait()
