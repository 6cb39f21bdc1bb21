"""An engine process with a tiny real model, and the gate before it: what a client's library meets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from engine.tool_templates import HERMES
from sidecar.running import RunningGate, running_gate, until
from sluice_engine.live_config import LiveConfig, SLOConfig
from tiny_model import PAD, make_tiny_llama

LIVE = {"slo": {"time_to_first_token_us": 10_000_000, "inter_token_latency_us": 500_000}}
MAX_SEQUENCES = 6
OPENING, OPENING_ID = "<tool_call>", PAD
"""The model's fourth special token opens a tool call."""
# These tests are about answers: on a busy machine nobody is refused for a promise.
PATIENT = LiveConfig(slo=SLOConfig(time_to_first_token_us=120_000_000, inter_token_latency_us=20_000_000))


@dataclass
class EngineProcess:
    """A running engine, and where its socket is."""

    socket_path: Path
    pid: int


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineProcess]:
    """One engine for all of these tests; whoever leaves something in it is found out by the next."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        folder = Path(name)
        make_tiny_llama(folder / "model")
        (folder / "model" / "chat_template.jinja").write_text(HERMES)
        tokenizer = folder / "model" / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace("<|pad|>", OPENING))
        config = {
            "model": {"source": {"path": str(folder / "model")}, "served_name": "tiny", "data_type": "Float32"},
            "cache": {"capacity_bytes": 8 * 2**20},
            "scheduling": {"max_sequences": MAX_SEQUENCES},
            "socket_path": str(folder / "s"),
            "live_path": str(folder / "live.json"),
            "table_dir": str(folder / "tables"),
            "termination_message_path": str(folder / "last-words"),
        }
        (folder / "live.json").write_text(json.dumps(LIVE))
        (folder / "engine.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "sluice_engine", "--config", str(folder / "engine.json")]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 120
            while not (folder / "s").exists():
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
            yield EngineProcess(folder / "s", process.pid)
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()
            assert "Traceback" not in (folder / "log").read_text()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
async def gate(engine: EngineProcess, tmp_path: Path) -> AsyncIterator[RunningGate]:
    """A gate of this test's own; at its end nothing is left in either program."""
    async with running_gate(engine, tmp_path, live=PATIENT, ready=False) as running:
        await until(lambda: running.gate.not_ready() is None, within_s=240)
        yield running
        await nothing_left(running)


@pytest.fixture
async def client(gate: RunningGate) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own library."""
    async with AsyncOpenAI(api_key="none", base_url=f"{gate.url}/v1", max_retries=0) as openai:
        yield openai


async def nothing_left(running: RunningGate) -> None:
    """Return once the engine holds no request and no block, and the gate's ledger nothing."""

    def is_empty() -> bool:
        state, room = running.gate.engine.state, running.gate.admission.room
        if state is None or state.pool is None:
            return False
        in_engine = len(state.requests), state.pool.total_blocks - state.pool.free_blocks
        at_gate = running.gate.in_flight, len(room.ledger.entries), running.gate.held.held_bytes
        return in_engine == (0, 0) and at_gate == (0, 0, 0)

    await until(is_empty, within_s=30)
