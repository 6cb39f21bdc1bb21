"""A model from a hub in a real process: its start, its end by SIGTERM, the next start; its environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession, UnixConnector

from hub_server import COMMIT, REPOSITORY, HubServer
from tiny_model import make_tiny_llama
from tunnel import Tunnel

LIVE = {"slo": {"time_to_first_token_us": 60_000_000, "inter_token_latency_us": 2_000_000}}
CERTIFICATES = Path(__file__).parent / "hub_certificates"
FETCH = """
import sys
from sluice_engine.config import HubSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.hub import fetch
source = HubSource(repository=sys.argv[1], file="tiny.gguf", cache_dir=sys.argv[2])
try:
    print(fetch(source, lambda progress: None, sleep=lambda s: None).path.read_bytes().decode())
except ModelUnavailable as error:
    print(f"{error.code}: {error}")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path holds 107 bytes, and pytest's own folders are longer."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        yield Path(name)


def start(folder: Path, hub: HubServer) -> subprocess.Popen[str]:
    source = {"hub": {"repository": REPOSITORY, "cache_dir": str(folder / "cache")}}
    config = {
        "model": {"source": source, "served_name": "tiny", "data_type": "Float32"},
        "cache": {"capacity_bytes": 4 * 2**20},
        "scheduling": {"max_sequences": 2},
        "socket_path": str(folder / "s"),
        "live_path": str(folder / "live.json"),
        "table_dir": str(folder / "tables"),
        "termination_message_path": str(folder / "last-words"),
    }
    (folder / "live.json").write_text(json.dumps(LIVE))
    (folder / "engine.json").write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(folder / "none")}
    command = [sys.executable, "-m", "sluice_engine", "--config", str(folder / "engine.json")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


async def state_when(folder: Path, process: subprocess.Popen[str], holds: Callable[[Any], bool]) -> Any:
    """The engine's state, once it is as wanted."""
    connector = UnixConnector(str(folder / "s"))
    async with ClientSession("http://engine", connector=connector) as http, asyncio.timeout(120):
        while True:
            assert process.poll() is None, process.communicate()[1]
            try:
                async with http.get("/state") as response:
                    state = await response.json()
                    if holds(state):
                        return state
            except ClientConnectionError:  # it has not bound its socket yet
                pass
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_download_ends_at_sigterm_and_the_next_start_goes_on_with_it(folder: Path) -> None:
    model = make_tiny_llama(folder / "model")
    size = sum(path.stat().st_size for path in model.iterdir())
    half = (model / "model.safetensors").stat().st_size // 2
    with HubServer(model, large_from=65536, hold=threading.Event()) as hub:
        process = start(folder, hub)
        try:

            def is_at_half(state: Any) -> bool:
                loading = state["loading"]
                return bool(loading["stage"] == "download" and loading["bytes_done"] >= size - half - 8)

            state = await state_when(folder, process, is_at_half)
            assert (state["phase"], state["loading"]["bytes_total"]) == ("loading", size)

            before = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(process.communicate, timeout=30)
            assert process.returncode == 0, said
            assert time.monotonic() - before < 20, "it does not wait for the hub"
            assert "start cut off" in said
        finally:
            process.kill()
            process.communicate()
        assert hub.hold is not None
        hub.hold.set()
        hub.asked.clear()

        process = start(folder, hub)
        try:
            state = await state_when(folder, process, lambda state: bool(state["phase"] == "ready"))
        finally:
            process.kill()
            process.communicate()

    assert state["model_revision"] == COMMIT
    ranges = [headers.get("range", "") for path, headers in hub.asked if "/store/" in path]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").removesuffix("-")) >= half - 65536


def fetched(hub: HubServer, folder: Path, **environment: str) -> str:
    """What a process with this environment says of a download."""
    theirs = ("_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
    own = {name: value for name, value in os.environ.items() if not name.upper().endswith(theirs)}
    done = subprocess.run(
        [sys.executable, "-c", FETCH, REPOSITORY, str(folder / "cache")],
        env={**own, "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(folder / "none"), **environment},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[HubServer]:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/tiny.gguf").write_text("weights" * 2000)
    with HubServer(tmp_path / "hub", tls=CERTIFICATES) as hub:
        yield hub


@pytest.mark.slow
def test_a_certificate_that_nobody_trusts_names_the_variable(secure: HubServer, tmp_path: Path) -> None:
    said = fetched(secure, tmp_path)

    assert (
        said == f"HubUnreachable: the certificate of {secure.url} is not trusted: name the CA's file in SSL_CERT_FILE"
    )


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_ca_of_ones_own_is_trusted(secure: HubServer, tmp_path: Path, variable: str) -> None:
    assert fetched(secure, tmp_path, **{variable: str(CERTIFICATES / "certificate.pem")}) == "weights" * 2000


@pytest.mark.slow
def test_the_way_leads_through_the_proxy_that_is_named(secure: HubServer, tmp_path: Path) -> None:
    with Tunnel() as proxy:
        said = fetched(
            secure, tmp_path, HTTPS_PROXY=proxy.url, SSL_CERT_FILE=str(CERTIFICATES / "certificate.pem")
        )  # fmt: skip
        beside = fetched(
            secure, tmp_path / "other", HTTPS_PROXY=proxy.url, NO_PROXY="127.0.0.1",
            SSL_CERT_FILE=str(CERTIFICATES / "certificate.pem"),
        )  # fmt: skip

    assert (said, beside) == ("weights" * 2000, "weights" * 2000)
    assert proxy.asked
    assert set(proxy.asked) == {f"CONNECT {secure.url.removeprefix('https://')} HTTP/1.1"}
    assert len(proxy.asked) <= 2, "NO_PROXY leads past it"
