"""The peers' own servers: how each is started here, with the demo model, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

import peer_install
from peer_clients import MODEL
from peer_weights import convert, gguf_path
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.config import EngineKind

KV_TOKENS_PER_SLOT = 512
START_S = 900.0
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "KMP_BLOCKTIME": "0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine, as it is started here."""

    kind: EngineKind
    command: list[str]
    slo: SLOConfig
    port: int
    max_sequences: int
    kv_tokens: int | None = None
    """Where it does not tell."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def peers(at: Path, slots: int, *, threads: int = 1, only: str = "") -> list[Peer]:
    """Those that are installed, each with so many requests at once; `threads` are vLLM's, llama.cpp has two."""
    found = []
    llama, vllm = peer_install.llama_server(at), peer_install.vllm_command(at)
    if llama is not None and only in {"", "llamacpp"}:
        port = free_port()
        command = [
            str(llama), "-m", str(gguf_path()), "-a", MODEL, "-np", str(slots), "-kvu",
            "-c", str(KV_TOKENS_PER_SLOT * slots),
            "-t", "2", "-b", "256", "--metrics", "--no-webui", "--port", str(port),
        ]  # fmt: skip
        slo = SLOConfig(time_to_first_token_us=3_000_000, inter_token_latency_us=500_000, reference_prompt_tokens=512)
        found.append(Peer("llamacpp", command, slo, port, slots, kv_tokens=KV_TOKENS_PER_SLOT * slots))
    if vllm is not None and only in {"", "vllm"}:
        port = free_port()
        command = [
            str(vllm), "serve", str(convert(at / "smol")), "--served-model-name", MODEL, "--max-model-len", "4096",
            "--max-num-seqs", str(slots), "--max-num-batched-tokens", "512", "--enforce-eager", "--host", "127.0.0.1",
            "--port", str(port),
        ]  # fmt: skip
        slo = SLOConfig(time_to_first_token_us=3_000_000, inter_token_latency_us=500_000, reference_prompt_tokens=512)
        found.append(
            Peer("vllm", command, slo, port, slots, environment=VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)})
        )
    return found


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def process(
    command: list[str], log: Path, environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs while inside; ended on the way out."""
    with log.open("wb") as file:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=file, env=os.environ | environment, start_new_session=True
        )
        try:
            yield child
        finally:
            if child.returncode is None:
                child.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(20):
                        await child.wait()
            kill(child)
            await child.wait()


def kill(child: asyncio.subprocess.Process) -> None:
    """It and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


async def answers(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    """Wait for a 200."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            if child.returncode is not None:
                raise SystemExit(f"it ended at start: {log}")
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
