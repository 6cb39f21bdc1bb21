"""`live.json`, which engine and gate follow while they run, each its own mounted copy."""

from __future__ import annotations

from pathlib import Path

from sluice_engine.codec import from_json
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import LiveConfig
from sluice_engine.watched import Watched, read_small

LiveFile = Watched[bytes, LiveConfig]


def live_file(path: str) -> LiveFile:
    """The file at this path; `load` it first."""
    where = Path(path)

    def read() -> bytes:
        try:
            return read_small(where)
        except OSError as error:
            raise InvalidConfig(path, f"cannot be read: {error.strerror}") from error

    return Watched("live.json", read, lambda content: from_json(LiveConfig, content, "live.json"))
