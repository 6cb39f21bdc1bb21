"""`/v1/models` and `/openapi.json`: the engine's own answers, and nothing else of it, however a path is written.

Must not know admission.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import aiohttp
from aiohttp import web

from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal
from sluice_sidecar.web.listener import SERVER, answer

MODELS = "/v1/models"
OPENAPI = "/openapi.json"
_TIMEOUT_S = 5.0


def is_page(path: str) -> bool:
    """Whether a path is the list of models, one of them, or the API's own description."""
    return path in {MODELS, OPENAPI} or path.startswith(f"{MODELS}/")


async def models(engine: EngineLink, path: str) -> web.Response:
    """The engine's answer to this path."""
    try:
        async with asyncio.timeout(_TIMEOUT_S), engine.request("GET", engine_path(path)) as upstream:
            body = await upstream.read()
            return web.Response(
                status=upstream.status, body=body, content_type="application/json", headers={"Server": SERVER}
            )
    except (EngineUnreachable, aiohttp.ClientError, ConnectionError, TimeoutError):
        return answer(Refusal(Reason.ENGINE_FAILED, f"The engine did not answer {path}."))


def engine_path(path: str) -> str:
    """The engine's path for it: whatever a client wrote behind `/v1/models/` is one name, and no way elsewhere."""
    if path == OPENAPI:
        return OPENAPI
    name = path.removeprefix(MODELS).removeprefix("/")
    return f"{MODELS}/{quote(name, safe='')}" if path.startswith(f"{MODELS}/") else MODELS
