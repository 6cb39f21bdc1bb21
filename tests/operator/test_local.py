"""A pod as local processes: real programs, a real model, and nothing left running."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import operator_scene as scene
from sluice_engine import codec
from sluice_operator.cli import main
from sluice_operator.errors import PodFailed
from sluice_operator.local.pod import LocalPod
from sluice_sidecar.telemetry.state import GateState

pytestmark = pytest.mark.slow

BROKEN = {
    "model": {"source": {"image": {"path": "/no/such/model"}}},
    "accelerator": {"count": 0},
    "cache": {"capacity": "64Mi"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: the step table that the first start measures serves the others."""
    return tmp_path_factory.mktemp("cache") / "sluice" / "step-times"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def complete(url: str, **body: Any) -> dict[str, Any]:
    sent = {"model": "smollm2-135m", "prompt": "The sky is", "max_tokens": 4, **body}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=sent) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_the_demo_serves_and_leaves_nothing_running(cache: Path) -> None:
    said: list[str] = []
    async with LocalPod(scene.example("demo-cpu"), cache_dir=cache) as pod:
        await pod.wait_ready(progress=said.append)
        answer = await complete(pod.url)
        state = await pod.state()
        pids = [pod.pid("gate"), pod.pid("engine")]
        folder = pod.log_path("gate").parent

    assert answer["usage"]["completion_tokens"] == 4
    assert state is not None
    assert state.ready
    assert said[0] == "starting"
    assert not any(is_running(pid) for pid in pids)
    assert not folder.exists()
    assert os.listdir(cache), "the step table is kept"  # noqa: PTH208  # a Path would be refused in async code


async def test_a_changed_promise_is_obeyed_by_both_programs_while_a_stream_runs(cache: Path) -> None:
    spec = scene.example("demo-cpu")
    wanted = dataclasses.replace(
        spec.live,
        slo=dataclasses.replace(spec.live.slo, inter_token_latency_us=700_000),
        scheduling=dataclasses.replace(spec.live.scheduling, prefill_chunk_tokens=48),
    )
    async with LocalPod(spec, cache_dir=cache) as pod:
        await pod.wait_ready()
        before = await pod.state()
        long = asyncio.create_task(complete(pod.url, max_tokens=200, ignore_eos=True))
        live = pod.log_path("gate").parent / "live" / "live.json"
        live.with_suffix(".next").write_text(codec.to_json(wanted))
        live.with_suffix(".next").replace(live)
        async with asyncio.timeout(60):
            while (now := await pod.state()) is None or not _obeys(now, codec.digest(wanted)):  # noqa: ASYNC110  # theirs
                await asyncio.sleep(0.1)
        answer = await long

    assert before is not None
    assert before.engine is not None
    assert now.engine is not None
    assert before.engine.boot_id == now.engine.boot_id
    assert now.promise == wanted.slo
    assert now.engine.derived is not None
    assert now.engine.derived.chunk_ceiling_tokens == 48
    assert answer["usage"]["completion_tokens"] == 200


def _obeys(state: GateState, live_hash: str) -> bool:
    return state.engine is not None and {state.live_config_hash, state.engine.live_config_hash} == {live_hash}


async def test_a_running_pod_explains_itself(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    async with LocalPod(scene.example("demo-cpu"), cache_dir=cache) as pod:
        await pod.wait_ready()
        answer = await complete(pod.url, max_tokens=8)
        url, name = pod.admin_url, f"req-{answer['id'].removeprefix('cmpl-')}"
        told = [
            await asyncio.to_thread(main.run, arguments)
            for arguments in (["explain", url, name], ["trace", url, "-o", str(trace)], ["top", url, "--once"])
        ]
        stranger = await asyncio.to_thread(main.run, ["explain", url, "req-nobody"])

    out = capsys.readouterr().out
    assert (told, stranger) == ([0, 0, 0], 1)
    for words in (
        f"{name}, came ",
        "Nobody was inside; the first token was predicted after",
        "Its first token came of step",
        "The promise was kept.",
        "smollm2-135m  ready  step",
    ):
        assert words in out
    assert "decode " in trace.read_text()


async def test_an_engine_that_cannot_start_says_why(cache: Path) -> None:
    async with LocalPod(scene.spec(BROKEN), cache_dir=cache) as pod:
        with pytest.raises(PodFailed, match=r"ModelMissing: .*/no/such/model"):
            await pod.wait_ready()
        gate = pod.pid("gate")

    assert not is_running(gate)


async def test_a_port_in_use_is_said_in_one_line(cache: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with LocalPod(scene.example("demo-cpu"), port=port, cache_dir=cache) as pod:
            with pytest.raises(PodFailed, match=r"the gate ended .*in use"):
                await pod.wait_failed()


async def test_the_command_serves_until_it_is_told_to_stop(cache: Path) -> None:
    command = [sys.executable, "-c", "from sluice_operator.cli.main import main; main()", "run", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command,
        str(scene.EXAMPLES / "demo-cpu.yaml"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parents[1])},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            served = json.loads(await process.stdout.readline())
        answer = await complete(served["url"])
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert answer["choices"][0]["finish_reason"] == "length"
    assert process.returncode == 0, errors.decode()
    assert errors.decode().rstrip().endswith("stopped")
