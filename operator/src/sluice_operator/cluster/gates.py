"""Asking the gates of running pods for their state.

Owns the HTTP client for it. A gate that does not answer is left out: what is not observed is not claimed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import aiohttp

from sluice_engine import codec
from sluice_engine.core.state import is_readable
from sluice_engine.errors import InvalidConfig
from sluice_sidecar.telemetry.state import SCHEMA_VERSION, GateState

ADMIN_PORT = 9090
_TIMEOUT = aiohttp.ClientTimeout(total=2)
# A document of a thousand requests is far below this; whatever is above it is no state.
_LIMIT_BYTES = 8 * 1024 * 1024


class GateClient:
    """Reads `/state` of gates."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def states(self, addresses: Mapping[str, str]) -> dict[str, GateState]:
        """The states of those pods (name → IP) that answer within two seconds."""
        answers = await asyncio.gather(*(self._state(address) for address in addresses.values()))
        return {name: state for name, state in zip(addresses, answers, strict=True) if state is not None}

    async def _state(self, address: str) -> GateState | None:
        host = f"[{address}]" if ":" in address else address
        return await self.state_at(f"http://{host}:{ADMIN_PORT}")

    async def state_at(self, url: str) -> GateState | None:
        """The state of the gate whose admin port is at `url`, or None."""
        try:
            async with self._session.get(f"{url}/state", timeout=_TIMEOUT) as response:
                if response.status != 200:
                    return None
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > _LIMIT_BYTES:
                        return None
                return decode_state(bytes(content))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def decode_state(content: bytes) -> GateState | None:
    """A gate's state from JSON; None for another version's or for something else."""
    try:
        document = json.loads(content)
        state = codec.decode(GateState, document, "state", ignore_unknown=True)
    except (ValueError, RecursionError, InvalidConfig):
        return None
    return state if is_readable(state.schema_version, SCHEMA_VERSION) else None
