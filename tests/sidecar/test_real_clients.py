"""Clients as people use them, against the gate: two generations of `openai` for Python, and curl, alone and in a loop.

What each does is predicted by `sluice_simulator.clients`, so that the simulator's clients are those of the world.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.telemetry.decisions import Decision
from sluice_simulator.clients import Retries, retry_delay_us

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Beside the environment that has the new one. The last client that tells nothing of its attempts; kept with what it
# needs in a folder of its own.
OLD = ROOT / ".venv" / "openai-old"
BODY = '{"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}'
# Beyond what a client was told: its own work, on a machine with other things to do.
LATE_US = 2_000_000


def pythons(version: str) -> dict[str, str]:
    if version == "new":
        return {}
    if not (OLD / "openai").exists():
        command = [str(ROOT / ".venv/bin/uv"), "pip", "install", "--quiet", "--target", str(OLD), "--require-hashes"]
        subprocess.run([*command, "-r", str(ROOT / "requirements/openai-old.txt")], check=True, timeout=120)
    return {"PYTHONPATH": str(OLD)}


async def run(*command: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


async def call(gate: RunningGate, version: str, max_retries: int = 2) -> dict[str, Any]:
    program = str(Path(__file__).parent / "client_program.py")
    found = json.loads(await run(sys.executable, "-P", program, gate.url, str(max_retries), **pythons(version)))
    assert found.pop("version").startswith("1." if version == "old" else "3.")
    assert isinstance(found, dict)
    return found


def curl(gate: RunningGate, answer: Path, *options: str) -> list[str]:
    # A file: curl wants to empty it before it tries again, which /dev/null does not let it do.
    written = ["-s", "-o", str(answer), "-w", "%{http_code}\n", "-H", "Content-Type: application/json", "-d", BODY]
    return ["curl", *written, *options, f"{gate.url}/v1/chat/completions"]


@asynccontextmanager
async def busy(engine: ScriptedEngine, directory: Path, **admission: Any) -> AsyncIterator[tuple[RunningGate, Any]]:
    """A gate whose four slots are taken until the function is called; its drain was measured."""
    live = live_config(max_wait_us=0)
    live = replace(live, admission=replace(live.admission, **admission))
    async with running_gate(engine, directory, live=live) as gate:
        for index in range(3):
            await read(gate, index)
        hold = asyncio.Event()
        engine.script = Script(hold_token={0: hold})
        running = [asyncio.create_task(read(gate, index)) for index in range(10, 14)]
        await until(lambda: len(gate.gate.admission.room.ledger.entries) == 4)

        async def free() -> None:
            hold.set()
            await asyncio.gather(*running)

        try:
            yield gate, free
        finally:
            await free()
            await empty(gate.gate)


async def read(gate: RunningGate, index: int) -> None:
    body = {"model": "tiny", "max_tokens": 16, "stream": True, "messages": [{"role": "user", "content": f"n{index}"}]}
    async with gate.client.post(f"{gate.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.read()


async def refused(gate: RunningGate, times: int) -> None:
    """A client's program takes seconds to start on a machine with other things to do."""
    async with asyncio.timeout(60):
        while gate.gate.admission.refused_total["slots"] < times:  # noqa: ASYNC110  # there is no event of its own
            await asyncio.sleep(0.001)


def attempts_of(gate: RunningGate) -> list[Decision]:
    """The client's own: those that filled the gate came before."""
    return gate.gate.admission.decisions.last(100)[7:]


def pause_us(before: Decision, after: Decision) -> int:
    assert before.ended_us is not None
    return after.arrived_us - before.ended_us


@pytest.mark.parametrize("version", ["new", "old"])
async def test_a_client_that_was_told_a_time_is_back_at_that_time_and_gets_in(
    engine: ScriptedEngine, socket_dir: Path, version: str
) -> None:
    async with busy(engine, socket_dir) as (gate, free):
        calling = asyncio.create_task(call(gate, version))
        await refused(gate, 1)
        await free()
        found = await calling
        first, second = attempts_of(gate)

    assert found == {"text": "toktoktok", "error": None, "status": None}
    assert (first.attempt, second.attempt) == (0, 1), "by its header, or by its body"
    assert first.retry_after_us is not None
    told_us = retry_delay_us(Retries(), 0, Refusal(Reason.SLOTS, "", first.retry_after_us), random.Random(0))
    assert told_us is not None
    assert 0 <= pause_us(first, second) - told_us + 10_000 < LATE_US


@pytest.mark.parametrize("version", ["new", "old"])
async def test_a_client_that_is_told_not_to_retry_does_not(
    engine: ScriptedEngine, socket_dir: Path, version: str
) -> None:
    async with busy(engine, socket_dir, retry_budget_percent=0) as (gate, _):
        found = await call(gate, version, max_retries=5)
        tried = attempts_of(gate)

    assert (found["error"], found["status"]) == ("slots", 429)
    assert [(one.attempt, one.reason) for one in tried] == [(0, "slots")], "no retry was left for it to make"


@pytest.mark.parametrize("version", ["new", "old"])
async def test_a_client_that_was_told_no_time_pauses_as_predicted_and_gives_up(
    engine: ScriptedEngine, socket_dir: Path, version: str
) -> None:
    async with running_gate(engine, socket_dir) as gate:
        await engine.kill()
        await until(lambda: gate.gate.not_ready() is not None)
        found = await call(gate, version)
        tried = gate.gate.admission.decisions.last(10)

    assert found["status"] == 503
    assert [one.reason for one in tried] == ["engine_dead"] * 3
    for attempt, (before, after) in enumerate(pairwise(tried)):
        least, most = (
            retry_delay_us(Retries(jitter_percent=percent), attempt, Refusal(Reason.ENGINE_DEAD, ""), _Highest())
            for percent in (25, 0)
        )
        assert least is not None
        assert most is not None
        assert least - 10_000 <= pause_us(before, after) < most + LATE_US


async def test_curl_comes_back_after_the_whole_seconds_it_was_told(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with busy(engine, socket_dir) as (gate, free):
        calling = asyncio.create_task(run(*curl(gate, socket_dir / "answer", "--retry", "3")))
        await refused(gate, 1)
        await free()
        codes = (await calling).split()
        first, second = attempts_of(gate)

    assert codes[-1] == "200"
    assert (first.attempt, second.attempt) == (0, 1), "it tells nothing: by its body"
    assert first.retry_after_us is not None
    told_us = -(-first.retry_after_us // 1_000_000) * 1_000_000
    assert 0 <= pause_us(first, second) - told_us + 10_000 < LATE_US


async def test_a_loop_of_curl_is_one_request_that_comes_again_and_gets_in_once_there_is_room(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with busy(engine, socket_dir) as (gate, free):
        line = " ".join(f"'{part}'" for part in curl(gate, socket_dir / "answer"))
        loop = f'for i in $(seq 200); do code=$({line}); echo "$code"; [ "$code" = 200 ] && break; done'
        looping = asyncio.create_task(run("bash", "-c", loop))
        await refused(gate, 5)
        await free()
        codes = (await looping).split()
        tried = attempts_of(gate)

    assert codes == ["429"] * (len(codes) - 1) + ["200"]
    assert [one.attempt for one in tried] == list(range(len(tried)))
    assert {one.reason for one in tried[:-1]} == {"slots"}
    assert gate.gate.admission.returning.verdicts == {"refused": len(tried) - 2, "admitted": 1}


async def test_a_loop_of_curl_does_not_get_past_a_spent_budget(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with busy(engine, socket_dir, retry_budget_percent=0) as (gate, _):
        line = " ".join(f"'{part}'" for part in curl(gate, socket_dir / "answer"))
        codes = (await run("bash", "-c", f"for i in 1 2 3 4 5 6 7 8; do {line}; done")).split()
        tried = attempts_of(gate)

    assert codes == ["429"] * 8
    assert [one.reason for one in tried] == ["slots"] + ["retry_budget"] * 7


class _Highest(random.Random):
    """Draws that shorten a pause the most."""

    def random(self) -> float:
        return 1.0
