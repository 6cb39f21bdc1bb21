"""What the gate knows of an engine, whichever it is: the shape that `sluice` and `foreign` have in common.

Server, proxy and admin port speak to this and to nothing else of an engine. Start reading here; `select` makes the one
that is configured.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp

from sluice_engine.config import SLOConfig
from sluice_engine.core.state import EngineState
from sluice_engine.core.terms import Terms
from sluice_sidecar.errors import Reason
from sluice_sidecar.life import EngineLife


class EngineLink(Protocol):
    """The engine as the gate sees it."""

    keeps_steps: bool
    """Whether it tells its steps and its step table."""
    life: EngineLife

    @property
    def loop_lag_us(self) -> int:
        """How late the last poll began: the gate's own event loop, measured."""
        ...

    @property
    def state(self) -> EngineState | None:
        """The last state; of an engine that tells none, what its metrics say in the same words."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...

    async def run(self) -> None:
        """Poll until cancelled."""
        ...

    def poke(self) -> None:
        """Something happened to a connection: look now."""
        ...

    def configure(self, slo: SLOConfig) -> None:
        """Another promise, from now on."""
        ...

    def unavailable(self) -> Reason | None:
        """Why no capacity exists; None when the engine can serve."""
        ...

    def start_problem(self) -> str | None:
        """What the start still waits for; None once the engine is ready. For the engine's startup probe."""
        ...

    def life_problem(self) -> str | None:
        """Positive evidence that the engine must be restarted; None without any. For its liveness probe."""
        ...

    def meaning_of(self, status: int) -> Reason | None:
        """What a status means with which the engine answered a call; None: it is the client's to read."""
        ...

    def body_for_engine(self, content: bytes, terms: Terms) -> bytes:
        """The body as this engine takes it: its own sign of a priority, and none where it would refuse one."""
        ...

    def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """One exchange with the engine; on leaving, an unfinished one closes its connection, which aborts it there.

        Raises:
            EngineUnreachable: no connection, or it broke before the status line.
        """
        ...

    async def get_json(self, path: str) -> Any:  # noqa: ANN401  # JSON has no narrower type
        """A JSON document of the engine's.

        Raises:
            EngineUnreachable: no answer, or one that is not JSON.
        """
        ...

    async def count_tokens(self, body: bytes) -> int | None:
        """The exact length of a prompt; None when the engine cannot tell, and will say why itself."""
        ...

    async def metrics_page(self) -> bytes:
        """The engine's metrics, without those of its process."""
        ...
