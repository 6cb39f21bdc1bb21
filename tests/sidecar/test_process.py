"""The gate as the process that a pod runs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.running import until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config
from sluice_engine import codec
from sluice_engine.core.state import PoolState
from sluice_sidecar.__main__ import main
from sluice_sidecar.config import GateConfig


def write_config(directory: Path, **changes: Any) -> Path:
    config = GateConfig(
        served_name="tiny",
        host="127.0.0.1",
        port=0,
        admin_port=0,
        engine_socket=str(directory / "engine.sock"),
        live_path=str(directory / "live.json"),
        run_dir=str(directory / "run"),
        endpoint_propagation_us=0,
    )
    (directory / "live.json").write_text(codec.to_json(live_config()))
    path = directory / "gate.json"
    path.write_text(codec.to_json(replace(config, **changes)))
    return path


@dataclass
class GateProcess:
    process: asyncio.subprocess.Process
    run_dir: Path
    address: dict[str, Any]
    client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address['port']}"

    async def stream(self) -> str:
        body = {"messages": [], "max_tokens": 5, "stream": True}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return f"{response.status} {(await response.read()).decode()}"


@asynccontextmanager
async def gate_process(directory: Path, **changes: Any) -> AsyncIterator[GateProcess]:
    run_dir = directory / "run"
    run_dir.mkdir()
    (run_dir / "drained").touch()
    config = write_config(directory, **changes)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "sluice_sidecar", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    address = run_dir / "gate-address.json"
    try:
        await until(address.exists)
        async with aiohttp.ClientSession() as client:
            gate = GateProcess(process, run_dir, json.loads(address.read_text()), client)
            while True:
                async with client.get(f"{gate.url}/readyz") as response:
                    if response.status == 200:
                        break
            yield gate
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def log_of(gate: GateProcess) -> list[dict[str, Any]]:
    assert gate.process.stderr is not None
    return [json.loads(line) for line in (await gate.process.stderr.read()).splitlines()]


@pytest.mark.slow
async def test_a_signal_with_nothing_in_flight_ends_it_with_0(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with gate_process(socket_dir) as gate:
        assert not (gate.run_dir / "drained").exists(), "what an earlier gate left is removed at start"

        gate.process.send_signal(signal.SIGTERM)

        assert await gate.process.wait() == 0
        assert [line["message"] for line in await log_of(gate)] == ["listening", "terminating"]


@pytest.mark.slow
async def test_a_gate_as_pods_run_it_answers_by_both_families(engine: ScriptedEngine, socket_dir: Path) -> None:
    """A pod has an address of one family or of both, and the gate is not told which."""
    body = {"messages": [], "max_tokens": 5, "stream": True}
    async with gate_process(socket_dir, host=GateConfig(served_name="tiny").host) as gate:
        for host in ("127.0.0.1", "[::1]"):
            async with gate.client.post(f"http://{host}:{gate.address['port']}/v1/chat/completions", json=body) as said:
                assert (await said.read()).endswith(b"data: [DONE]\n\n"), host
            async with gate.client.get(f"http://{host}:{gate.address['admin_port']}/engine/livez") as said:
                assert said.status == 200, host


@pytest.mark.slow
async def test_a_signal_lets_every_stream_end_first(engine: ScriptedEngine, socket_dir: Path) -> None:
    hold = asyncio.Event()
    engine.script = Script(tokens=5, hold_token={2: hold})
    async with gate_process(socket_dir) as gate:
        streams = [asyncio.create_task(gate.stream()) for _ in range(4)]
        await until(lambda: len(engine.active) == 4)

        gate.process.send_signal(signal.SIGTERM)
        while not (await gate.stream()).startswith("503"):
            pass
        hold.set()

        assert [text.endswith("data: [DONE]\n\n") for text in await asyncio.gather(*streams)] == [True] * 4
        assert await gate.process.wait() == 0
        assert (gate.run_dir / "drained").exists()


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.script = Script(hold_token={1: asyncio.Event()})
    async with gate_process(socket_dir) as gate:
        # All slots are taken, so that none of those who knock below is let in before the signal has come.
        streams = [asyncio.create_task(gate.stream()) for _ in range(4)]
        await until(lambda: len(engine.active) == 4)

        gate.process.send_signal(signal.SIGTERM)
        while not (await gate.stream()).startswith("503"):
            pass
        gate.process.send_signal(signal.SIGTERM)

        assert await gate.process.wait() == 0
        await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.slow
async def test_the_pre_stop_signal_drains_and_goes_on_answering(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with gate_process(socket_dir) as gate:
        gate.process.send_signal(signal.SIGUSR1)
        await until((gate.run_dir / "drained").exists)

        assert (await gate.stream()).startswith("503")
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.process.wait() == 0


@pytest.mark.slow
async def test_it_needs_little_memory(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with gate_process(socket_dir) as gate:
        for _ in range(20):
            await gate.stream()

        assert resident_kib(gate) < 120 * 1024
        assert "torch" not in Path(f"/proc/{gate.process.pid}/maps").read_text()  # noqa: ASYNC240  # likewise


@pytest.mark.slow
async def test_readers_that_stall_hold_a_bounded_share_of_memory(engine: ScriptedEngine, socket_dir: Path) -> None:
    readers = 60
    assert engine.state.derived is not None
    engine.state = replace(
        engine.state,
        pool=PoolState(block_tokens=16, total_blocks=100_000, free_blocks=100_000),
        derived=replace(engine.state.derived, max_sequences=2 * readers, kv_capacity_tokens=1_600_000),
    )
    engine.script = Script(tokens=100_000, text="tok" * 1_000)
    body = b'{"messages": [], "max_tokens": 2, "stream": true}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    loop = asyncio.get_running_loop()
    async with gate_process(socket_dir) as gate:
        before_kib = resident_kib(gate)
        sockets = []
        for _ in range(readers):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", gate.address["port"]))
            await loop.sock_sendall(sock, request)
            sockets.append(sock)
        await until(lambda: len(engine.active) == readers)
        seen = -1
        while seen != engine.sent_tokens:  # until nobody takes any more
            seen = engine.sent_tokens
            await asyncio.sleep(0.5)  # nothing happening has no event of its own

        grown_kib = resident_kib(gate) - before_kib

        assert grown_kib < readers * 300, f"{grown_kib / readers:.0f} KiB for each"
        for sock in sockets:
            sock.close()
        await until(lambda: not engine.active)


def resident_kib(gate: GateProcess) -> int:
    status = Path(f"/proc/{gate.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("{", "gate.json: is not JSON", id="not-json"),
        pytest.param('{"served_name": "a", "prot": 1}', "gate.json.prot: is not a known field", id="a-slip"),
        pytest.param('{"served_name": "a", "port": "x"}', "gate.json.port: must be of type int", id="a-wrong-type"),
        pytest.param('{"served_name": "a", "port": 70000}', "port: must be 0 to 65535", id="out-of-range"),
        pytest.param(
            '{"served_name": "a", "live_path": "/none"}', "/none: cannot be read: No such file", id="no-live-config"
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "gate.json"
    path.write_text(text)

    status = main(["--config", str(path)])

    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_a_port_in_use_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        status = main(["--config", str(write_config(tmp_path, port=port))])

    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.count("\n") == 1
    assert captured.err == f"PortInUse: 127.0.0.1:{port}: Address already in use\n"


def test_a_full_disk_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    config = write_config(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)

    status = main(["--config", str(config)])

    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"DiskFull: {tmp_path}/run/gate-address")
    assert "No space left on device" in captured.err


def test_a_missing_file_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "gate.json")]) == 2
    assert capsys.readouterr().err == f"sluice_sidecar: {tmp_path}/gate.json: No such file or directory\n"
