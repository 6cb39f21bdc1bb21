"""`sluice run` with another engine: a program called vllm on the PATH, a real gate before it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import aiohttp
import pytest

import operator_scene as scene
from foreign_scene import foreign
from sluice_operator.local.pod import LocalPod

pytestmark = pytest.mark.slow

PROGRAM = """#!/bin/sh
# Stands for vLLM: the tests' scripted server, at the port that it is told.
exec {python} -c '
import asyncio, signal, sys
sys.path.insert(0, "{tests}")
from sidecar.foreign_server import ForeignServer
port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with ForeignServer(port=port).running():
        await stop.wait()
asyncio.run(main())
' "$@"
"""


async def test_the_gate_stands_before_the_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable, tests=Path(scene.__file__).parent))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    spec = foreign("VLLM", {"model": {"servedName": "tiny", "source": {"image": {"path": "/mine"}}}})

    async with LocalPod(spec, cache_dir=tmp_path / "cache") as pod:
        await pod.wait_ready(timeout_s=60)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
        async with aiohttp.ClientSession() as session, session.post(f"{pod.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["choices"][0]["text"] == "tok"
        state = await pod.state()

    assert state is not None
    assert state.engine is not None
    assert state.engine.engine == "vllm"
