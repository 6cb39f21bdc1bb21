"""A real engine's record: the simulator's scheduler plans every step of it as the engine did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import yaml

import operator_scene as scene
from sluice_operator.local.pod import LocalPod
from sluice_simulator import replay, scenario
from sluice_simulator.record import read_record
from sluice_simulator.recorder import Watch
from sluice_simulator.replay import measured
from sluice_simulator.retrace import retrace
from sluice_simulator.run import assembled_of

pytestmark = pytest.mark.slow

EXAMPLE = scene.EXAMPLES / "demo-cpu.yaml"


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> bool:
    """Whether it was let in."""
    words = "the quick brown fox " * (1 + number % 7 * 9)
    body = {
        "model": "smollm2-135m",
        "prompt": f"{number} {words}",
        "max_tokens": 4 + number % 5 * 6,
        "temperature": 0,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        await response.read()
        return response.status == 200


async def test_a_real_engines_steps_are_planned_again(tmp_path: Path) -> None:
    watch, answered = Watch(), 0
    async with LocalPod(scene.example("demo-cpu"), cache_dir=tmp_path / "step-times") as pod:
        await pod.wait_ready()
        await asyncio.to_thread(watch.look, pod.admin_url)
        async with aiohttp.ClientSession() as session:
            for wave in range(4):
                answered += sum(await asyncio.gather(*(ask(session, pod.url, 10 * wave + i) for i in range(10))))
        await asyncio.to_thread(watch.look, pod.admin_url)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(watch.document(yaml.safe_load(EXAMPLE.read_text()))))

    record = read_record(path)
    own = scenario.parse(replay.with_record(replay.document_of(record), record), str(path))
    plans = retrace(record, assembled_of(own))

    assert plans.difference == ""
    assert plans.same == plans.compared > 40
    assert measured(record)["requests"] == len(record.requests) == answered >= 10
