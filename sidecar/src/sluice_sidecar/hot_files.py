"""What may change while the gate runs: `live.json`, and the API keys where they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Protocol

from sluice_engine.live_config import LiveConfig
from sluice_engine.live_file import live_file
from sluice_engine.watched import Watched
from sluice_sidecar.callers.api_keys import ApiKeys
from sluice_sidecar.callers.key_files import key_files
from sluice_sidecar.config import GateConfig


class Configurable(Protocol):
    """Who obeys them."""

    def configure(self, live: LiveConfig) -> None:
        """Obey another `live.json`."""
        ...

    def use_keys(self, keys: ApiKeys) -> None:
        """Know callers by other keys."""
        ...


class HotFiles:
    """The gate's watched files."""

    def __init__(self, config: GateConfig, secret: bytes) -> None:
        """`secret`: of this process, for the digests of keys."""
        self.live = live_file(config.live_path)
        self.keys = key_files(config.api_keys_dir, secret) if config.api_keys_dir else None

    def __iter__(self) -> Iterator[Watched[Any, Any]]:
        yield self.live
        if self.keys is not None:
            yield self.keys

    async def follow(self, gate: Configurable) -> None:
        """Hand on what changes; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.live.follow(gate.configure))
            if self.keys is not None:
                tasks.create_task(self.keys.follow(gate.use_keys))
