"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` on the admin port: passed on to an engine that has them.

They are not on the API's port: a client that may ask for answers may not choose among the node's files. Which of them
the engine may load at all, its configuration says. Must not know admission.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal, Refused, shown
from sluice_sidecar.web.body import Body, HeldBodies
from sluice_sidecar.web.listener import answer

PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# Gigabytes from a network's file system take their time.
_TIMEOUT_S = 300.0
_MAX_BODY_BYTES = 64 * 1024
_MAX_HELD_BYTES = 16 * _MAX_BODY_BYTES


class AdapterRoutes:
    """Both of them."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._held = HeldBodies(_MAX_HELD_BYTES)

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """The engine's answer."""
        if request.method != "POST":
            message = f"The route {shown(request.path)} takes POST, not {request.method}."
            return answer(Refusal(Reason.METHOD_NOT_ALLOWED, message), {"Allow": "POST"})
        body = Body(self._held)
        try:
            await body.read(request, _MAX_BODY_BYTES, _busy)
            headers = {"Content-Type": "application/json"}
            exchange = self._engine.request("POST", request.path, headers=headers, body=body.content)
            async with asyncio.timeout(_TIMEOUT_S), exchange as upstream:
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
        except Refused as error:
            return answer(error.refusal)
        except (EngineUnreachable, aiohttp.ClientError, ConnectionError, TimeoutError):
            return answer(Refusal(Reason.ENGINE_DEAD, "The engine does not answer."))
        finally:
            body.drop()


def _busy() -> Refusal:
    return Refusal(Reason.BODIES_HELD, "Too many requests for adapters are being read.")
