"""Whether the operator does its work, told from what it did, and the small HTTP server that says so.

Owns the heartbeats. A process whose watches went silent or whose resync no longer gets through is not live, however
promptly it answers here.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST


class Health:
    """Heartbeats with a deadline each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beats: dict[str, tuple[float, float]] = {}
        self.is_synced = False
        """Whether everything was listed once: before that, nothing is known."""
        self.is_standby = False
        """Whether another process acts, and this one is ready to follow it."""

    def expect(self, name: str, within_s: float) -> None:
        """From now on `name` has to beat at least this often."""
        self._beats[name] = (self._clock(), within_s)

    def beat(self, name: str) -> None:
        """`name` did its work just now."""
        _, within_s = self._beats[name]
        self._beats[name] = (self._clock(), within_s)

    def ages(self) -> list[tuple[str, float, float]]:
        """Each heartbeat with its age and what that may reach, in seconds."""
        now = self._clock()
        return [(name, now - last, within_s) for name, (last, within_s) in self._beats.items()]

    def problems(self) -> list[str]:
        """A line for each heartbeat that is overdue."""
        return [
            f"{name}: silent for {age_s:.0f} s, allowed are {within_s:.0f} s"
            for name, age_s, within_s in self.ages()
            if age_s > within_s
        ]


def application(health: Health, registry: CollectorRegistry) -> web.Application:
    """`/livez`, `/readyz` and `/metrics`."""

    async def livez(_: web.Request) -> web.Response:
        overdue = health.problems()
        return web.Response(status=503 if overdue else 200, text="\n".join(overdue) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        if health.is_standby:
            return web.Response(text="standing by: another operator holds the lease")
        if not health.is_synced:
            return web.Response(status=503, text="not everything was listed yet")
        return web.Response(text="ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app
