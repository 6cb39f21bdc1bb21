"""A gate on a loopback port in front of a scripted engine, inside the test's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from sidecar.scripted_engine import live_config
from sluice_engine.live_config import LiveConfig
from sluice_sidecar.admin import Admin
from sluice_sidecar.callers.api_keys import ApiKeys
from sluice_sidecar.config import GateConfig
from sluice_sidecar.server import Gate
from sluice_sidecar.web.listener import GateServer, bind


def clock_us() -> int:
    return time.monotonic_ns() // 1000


class OnSocket(Protocol):
    """An engine that the gate finds at a Unix socket."""

    socket_path: Path


@dataclass
class RunningGate:
    """What a test talks to."""

    gate: Gate
    url: str
    admin_url: str
    client: aiohttp.ClientSession
    host: str
    port: int
    server: GateServer

    def post(self, *, path: str = "/v1/chat/completions", **request: Any) -> Any:
        """A chat request, streamed unless told otherwise."""
        headers = request.pop("headers", None)
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
        body |= {"stream": True} | request
        return self.client.post(self.url + path, json=body, headers=headers)


@asynccontextmanager
async def running_gate(
    engine: OnSocket | None,
    tmp_path: Path,
    /,
    *,
    live: LiveConfig | None = None,
    keys: ApiKeys | None = None,
    ready: bool = True,
    **changes: Any,
) -> AsyncIterator[RunningGate]:
    """A gate that has seen its engine ready, unless `ready` is False; before another engine where it is given none."""
    settings: dict[str, Any] = {
        "served_name": "tiny",
        "engine_socket": "" if engine is None else str(engine.socket_path),
        "run_dir": str(tmp_path),
        "state_interval_us": 10_000,
        "endpoint_propagation_us": 0,
        "drain_timeout_us": 20_000_000,
    }
    config = GateConfig(**(settings | changes))
    gate = Gate(config, live or live_config(), clock=clock_us, draw=lambda lo, hi: (lo + hi) // 2, keys=keys)
    runners = []
    ports = []
    user_timeout_ms = config.stall_timeout_us // 1000
    door = GateServer(gate.handle, user_timeout_ms=user_timeout_ms, door=gate)
    for server in (door, GateServer(Admin(gate).handle, user_timeout_ms=user_timeout_ms)):
        runner = web.ServerRunner(server, shutdown_timeout=0.01)
        await runner.setup()
        sock = bind("127.0.0.1", 0)
        await web.SockSite(runner, sock).start()
        runners.append(runner)
        ports.append(sock.getsockname()[1])
    poller = asyncio.create_task(gate.engine.run())
    public, private = ports
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            if ready:
                await until(lambda: gate.not_ready() is None)
            yield RunningGate(
                gate, f"http://127.0.0.1:{public}", f"http://127.0.0.1:{private}", client, "127.0.0.1", public, door
            )
    finally:
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)
        for runner in runners:
            await runner.cleanup()
        await gate.engine.close()


async def until(claim: Callable[[], bool], within_s: float = 10) -> None:
    """Let the loop run until the claim holds; fails when it does not in time."""
    async with asyncio.timeout(within_s):
        while not claim():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.001)


async def empty(gate: Gate) -> None:
    """Wait until nothing is held: no request, no ledger entry, no body, no place at the door."""
    admission = gate.admission
    await until(
        lambda: (
            (gate.in_flight, len(admission.room.ledger.entries), gate.held.held_bytes, admission.waiting)
            == (0, 0, 0, 0)
        )
    )
