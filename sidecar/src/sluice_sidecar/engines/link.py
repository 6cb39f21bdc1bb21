"""What the gate knows of an engine, whichever it is, and all that `sluice` and `foreign` do alike.

Server, proxy and admin port speak to this and to nothing else of an engine. Owns the connection, the beat of the polls
and the engine's life; what a poll reads is its own of each. Start reading here; `select` makes the one that is
configured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import aiohttp

from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.life import EngineLife
from sluice_sidecar.engines.connection import EngineConnection
from sluice_sidecar.engines.poll import Beat
from sluice_sidecar.errors import Reason


class EngineLink(ABC):
    """The engine as the gate sees it."""

    keeps_steps: ClassVar[bool]
    """Whether it tells its steps and its step table."""

    def __init__(
        self,
        connection: EngineConnection,
        admission: Admission,
        clock: Callable[[], int],
        interval_us: int,
        life: EngineLife,
    ) -> None:
        self._connection = connection
        self._admission = admission
        self._clock = clock
        self._beat = Beat(self.poll, interval_us)
        self.life = life

    @property
    def state(self) -> EngineState | None:
        """The last state; of an engine that tells none, what its metrics say in the same words."""
        return self.life.state

    @property
    def loop_lag_us(self) -> int:
        """How late the last poll began: the gate's own event loop, measured."""
        return self._beat.lag_us

    async def close(self) -> None:
        """Close every connection."""
        await self._connection.close()

    async def run(self) -> None:
        """Poll until cancelled."""
        await self._beat.run()

    def poke(self) -> None:
        """Something happened to a connection: look now."""
        self._beat.poke()

    def unavailable(self) -> Reason | None:
        """Why no capacity exists; None when the engine can serve."""
        return self.life.unavailable(self._clock(), has_limits=self._admission.room.limits is not None)

    def start_problem(self) -> str | None:
        """What the start still waits for; None once the engine is ready. For the engine's startup probe."""
        return self.life.start_problem()

    def life_problem(self) -> str | None:
        """Positive evidence that the engine must be restarted; None without any. For its liveness probe."""
        return self.life.life_problem(self._clock())

    def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """One exchange with the engine; on leaving, an unfinished one closes its connection, which aborts it there.

        Raises:
            EngineUnreachable: no connection, or it broke before the status line.
        """
        return self._connection.request(method, path, headers=headers, body=body)

    async def get_json(self, path: str) -> Any:  # noqa: ANN401  # JSON has no narrower type
        """A JSON document of the engine's.

        Raises:
            EngineUnreachable: no answer, or one that is not JSON.
        """
        return await self._connection.get_json(path)

    # What each does in its own way.

    @abstractmethod
    async def poll(self) -> None:
        """Look at it once and act on it."""

    @abstractmethod
    def configure(self, slo: SLOConfig) -> None:
        """Another promise, from now on."""

    @abstractmethod
    def meaning_of(self, status: int) -> Reason | None:
        """What a status means with which the engine answered a call; None: it is the client's to read."""

    @abstractmethod
    def body_for_engine(self, content: bytes, terms: Terms) -> bytes:
        """The body as this engine takes it: its own sign of a priority, and none where it would refuse one."""

    @abstractmethod
    async def count_tokens(self, body: bytes) -> int | None:
        """The exact length of a prompt; None when the engine cannot tell."""

    @abstractmethod
    async def metrics_page(self) -> bytes:
        """The engine's metrics, without those of its process."""
