"""`/v1/models` and `/openapi.json`: the engine's own answers, and nothing else of it, however a path is written.

Must not know admission.
"""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.pages import passed_on

MODELS = "/v1/models"
OPENAPI = "/openapi.json"
_TIMEOUT_S = 5.0


def is_page(path: str) -> bool:
    """Whether a path is the list of models, one of them, or the API's own description."""
    return path in {MODELS, OPENAPI} or path.startswith(f"{MODELS}/")


async def models(engine: EngineLink, path: str) -> web.Response:
    """The engine's answer to this path."""
    return await passed_on(engine.request("GET", engine_path(path)), path, _TIMEOUT_S)


def engine_path(path: str) -> str:
    """The engine's path for it: whatever a client wrote behind `/v1/models/` is one name, and no way elsewhere."""
    if path == OPENAPI:
        return OPENAPI
    name = path.removeprefix(MODELS).removeprefix("/")
    return f"{MODELS}/{quote(name, safe='')}" if path.startswith(f"{MODELS}/") else MODELS
