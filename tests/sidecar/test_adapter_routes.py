"""LoRA adapters at the gate: changed by the admin port, never by the API's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from sidecar.running import running_gate
from sluice_sidecar.adapters import PATHS

LOAD, UNLOAD = PATHS


@dataclass
class Engine:
    socket_path: Path
    asked: list[tuple[str, bytes]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.read()))
        if request.path == LOAD:
            return web.Response(text="Success: LoRA adapter 'sql' added successfully.")
        return web.json_response({"error": {"code": "adapter_not_found"}}, status=404)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path / "engine.sock") as engine:
        yield engine


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Engine]:
    engine = Engine(path)
    app = web.Application()
    app.add_routes([web.post(path, engine.answer) for path in PATHS])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield engine
    finally:
        await runner.cleanup()


async def test_the_admin_port_passes_on_what_the_engine_is_asked_and_answers(engine: Engine, tmp_path: Path) -> None:
    body = b'{"lora_name": "sql", "lora_path": "sql"}'
    async with running_gate(engine, tmp_path, ready=False) as gate:
        async with gate.client.post(gate.admin_url + LOAD, data=body) as response:
            assert (response.status, await response.text()) == (200, "Success: LoRA adapter 'sql' added successfully.")
        async with gate.client.post(gate.admin_url + UNLOAD, data=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "adapter_not_found")
    assert engine.asked == [(LOAD, body), (UNLOAD, body)]


@pytest.mark.parametrize("path", PATHS)
async def test_the_api_s_port_has_no_such_route(engine: Engine, tmp_path: Path, path: str) -> None:
    async with (
        running_gate(engine, tmp_path, ready=False) as gate,
        gate.client.post(gate.url + path, json={"lora_name": "a", "lora_path": "a"}) as response,
    ):
        assert response.status == 404
    assert not engine.asked


async def test_what_is_no_such_request_stays_at_the_gate(engine: Engine, tmp_path: Path) -> None:
    async with running_gate(engine, tmp_path, ready=False) as gate:
        async with gate.client.get(gate.admin_url + LOAD) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with gate.client.post(gate.admin_url + LOAD, data=b"x" * 70_000) as response:
            assert response.status == 413
    assert not engine.asked


async def test_an_engine_that_is_gone_is_said_so(tmp_path: Path) -> None:
    async with (
        running_gate(Engine(tmp_path / "nobody.sock"), tmp_path, ready=False) as gate,
        gate.client.post(gate.admin_url + UNLOAD, json={"lora_name": "a"}) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (503, "engine_dead")
