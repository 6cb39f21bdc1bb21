"""`live.json` as it changes while a program runs: engine and gate each follow their own mounted copy with it.

Owns what was read last and why it was refused. A file that cannot be understood changes nothing: the configuration in
force stays, the refusal is logged once and counted, and `/state` shows it until a good file is there. What a change
means is for those to whom it is handed.

The file is read once a second: it is small, a read needs none of the node's inotify instances, and it does not matter
by how many links the kubelet swaps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sluice_engine.codec import digest, from_json
from sluice_engine.config import LiveConfig
from sluice_engine.errors import InvalidConfig

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0


class LiveFile:
    """One `live.json`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.applied_total = 0
        """Changes that were handed on."""
        self.refused_total = 0
        """Contents that could not be understood."""
        self.problem = ""
        """Why the file as it is now was refused; empty while it is in force."""
        self._content: bytes | None = None
        self._live: LiveConfig | None = None

    def load(self) -> LiveConfig:
        """The configuration to start with.

        Raises:
            InvalidConfig: it cannot be read or understood; there is none to fall back on.
        """
        content = self._read()
        live = from_json(LiveConfig, content, self.path.name)
        self._content, self._live = content, live
        return live

    def changed(self) -> LiveConfig | None:
        """What the file says now, where that differs from what it said before and can be understood."""
        try:
            content = self._read()
            if content == self._content and not self.problem:
                return None
            live = from_json(LiveConfig, content, self.path.name)
        except InvalidConfig as error:
            self._refuse(str(error))
            return None
        self._content, self.problem = content, ""
        if live == self._live:
            return None
        self._live = live
        self.applied_total += 1
        log.info("live configuration changed", extra={"live_config_hash": digest(live)})
        return live

    async def follow(self, apply: Callable[[LiveConfig], None], every_s: float = READ_EVERY_S) -> None:
        """Hand on each change; never returns."""
        while True:
            await asyncio.sleep(every_s)
            live = self.changed()
            if live is not None:
                apply(live)

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self.refused_total += 1
        log.error("live configuration refused, the old one stays", extra={"error": problem})

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise InvalidConfig(str(self.path), f"cannot be read: {error.strerror}") from error
