from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from sidecar.running import RunningGate, running_gate
from sidecar.scripted_engine import ScriptedEngine


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What reads and writes below aiohttp is tested on the loop of the gate's own process as well."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    return factories | ({"uvloop": uvloop.Loop} if item.path.name == "test_relay.py" else {})


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A short path: a Unix socket's name has room for about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as directory:
        yield Path(directory)


@pytest.fixture
async def engine(socket_dir: Path) -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(socket_dir / "engine.sock").running() as engine:
        yield engine


@pytest.fixture
async def gate(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[RunningGate]:
    async with running_gate(engine, socket_dir) as running:
        yield running
