"""The benchmark beside other engines ends with all that it started, however it is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLUICE_TEST_MARK"
# A server that is healthy, has a child of its own, and never answers a chat.
ENGINE = """#!{python}
import http.server, pathlib, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        pathlib.Path({asked!r}).touch()
        while True:
            self.rfile.read()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def marked(mark: str) -> list[int]:
    """Processes that were started by somebody with this mark in his environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_ended_under_load_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    asked, engine, mark = tmp_path / "asked", tmp_path / "llama/bin/llama-server", uuid.uuid4().hex
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE.format(python=sys.executable, asked=str(asked)))
    engine.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "benchmarks/peer_load.py"), "--quick",
        env=os.environ | {"SLUICE_PEERS": str(tmp_path), MARK: mark}, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not asked.exists():
            assert process.returncode is None, "it ended by itself"
            await asyncio.sleep(0.05)  # another process's file
        started = marked(mark)
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 180)

        assert len(started) >= 5, "the benchmark, engine, gate, the peer and its child"
        for _ in range(1200):
            if not marked(mark):
                break
            await asyncio.sleep(0.05)  # who was killed last may still be on its way out
        assert marked(mark) == []
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


async def test_without_a_peer_it_says_how_to_install_one_and_make_bench_goes_on(tmp_path: Path) -> None:
    for options, code in (["--if-installed"], 0), ([], 2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "benchmarks/peer_load.py"), *options,
            env=os.environ | {"SLUICE_PEERS": str(tmp_path)}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()

        assert (process.returncode, said.decode().count("\n")) == (code, 1)
        assert "`make peers` does it" in said.decode()
