"""`live.json` and API keys while the gate runs: obeyed by the next request, and nobody inside notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mounted import Mounted
from sidecar.running import running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config
from sidecar.test_process import GateProcess, gate_process, log_of
from sluice_engine import codec
from sluice_engine.live_config import LiveConfig

OLD, NEW = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"


def promise(ttft_us: int) -> LiveConfig:
    live = live_config()
    return replace(live, slo=replace(live.slo, time_to_first_token_us=ttft_us))


async def test_another_promise_is_the_one_that_requests_are_held_against(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with running_gate(engine, socket_dir) as gate:
        gate.gate.configure(promise(1))
        async with gate.post() as response:  # an idle pod takes it, whatever was promised
            await response.read()
        gate.gate.configure(promise(10_000_000))
        async with gate.post() as response:
            await response.read()
        page = gate.gate.metrics.page().decode()
        async with gate.client.get(f"{gate.admin_url}/state") as response:
            state = await response.json()
    assert state["live_config_hash"] == codec.digest(promise(10_000_000))
    assert state["promise"]["time_to_first_token_us"] == 10_000_000
    for verdict in ("ttft_missed", "kept"):
        assert f'sluice_gate_promise_total{{verdict="{verdict}"}} 1.0' in page


async def state_when(gate: GateProcess, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            async with gate.client.get(f"http://127.0.0.1:{gate.address['admin_port']}/state") as response:
                state: dict[str, Any] = await response.json()
            if holds(state):
                return state


async def status_with(gate: GateProcess, key: str) -> int:
    body = {"messages": [], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status


@pytest.mark.slow
async def test_mounted_files_are_followed_under_a_running_stream(engine: ScriptedEngine, socket_dir: Path) -> None:
    live = Mounted(socket_dir / "live", {"live.json": codec.to_json(live_config())})
    keys = Mounted(socket_dir / "keys", {"team-a": OLD})
    hold = asyncio.Event()
    engine.script = Script(tokens=5, hold_token={2: hold})
    changes = {"live_path": str(live.folder / "live.json"), "api_keys_dir": str(keys.folder)}
    async with gate_process(socket_dir, **changes) as gate:
        gate.client.headers["Authorization"] = f"Bearer {OLD}"
        stream = asyncio.create_task(gate.stream())
        await until(lambda: len(engine.active) == 1)
        engine.script = Script(tokens=1)

        live.swap({"live.json": codec.to_json(promise(7_000_000))})
        wanted = codec.digest(promise(7_000_000))
        await state_when(gate, lambda state: state["live_config_hash"] == wanted)
        live.swap({"live.json": "{}"})
        refused = await state_when(gate, lambda state: bool(state["live_config_refused"]))
        assert refused["live_config_refused"] == "live.json.slo: is missing"
        assert refused["live_config_hash"] == wanted

        assert (await status_with(gate, OLD), await status_with(gate, NEW)) == (200, 401)
        keys.swap({"team-a": f"{OLD}\n{NEW}"})
        await state_when(gate, lambda state: state["api_keys"] == 2)
        assert (await status_with(gate, OLD), await status_with(gate, NEW)) == (200, 200)
        keys.swap({"team-a": "broken"})
        await state_when(gate, lambda state: bool(state["api_keys_refused"]))
        keys.swap({"team-a": NEW})
        await state_when(gate, lambda state: state["api_keys"] == 1)
        assert (await status_with(gate, OLD), await status_with(gate, NEW)) == (401, 200)

        hold.set()
        assert (await stream).endswith("data: [DONE]\n\n")
        async with gate.client.get(f"http://127.0.0.1:{gate.address['admin_port']}/metrics") as response:
            page = await response.text()
        gate.process.terminate()
        assert await gate.process.wait() == 0
        log = await log_of(gate)
    for file, applied in (("live.json", 1), ("api keys", 2)):
        assert f'sluice_gate_config_changes_total{{file="{file}",result="applied"}} {applied}.0' in page
        assert f'sluice_gate_config_changes_total{{file="{file}",result="refused"}} 1.0' in page
    told = [line["message"] for line in log if "configuration" in line["message"]]
    assert len(told) == 5
    assert not any(key in str(log) for key in (OLD, NEW, "broken"))
