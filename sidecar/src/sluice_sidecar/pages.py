"""What the engine answers by itself, without its steps, passed on as it is.

Must not know which pages there are, nor admission.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import web

from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal
from sluice_sidecar.web.listener import SERVER, answer


async def passed_on(
    exchange: AbstractAsyncContextManager[aiohttp.ClientResponse], path: str, timeout_s: float
) -> web.Response:
    """The engine's answer to what was asked of it for `path`, or that there was none in time."""
    try:
        async with asyncio.timeout(timeout_s), exchange as upstream:
            return web.Response(
                status=upstream.status,
                body=await upstream.read(),
                content_type="application/json",
                headers={"Server": SERVER},
            )
    except (EngineUnreachable, aiohttp.ClientError, ConnectionError, TimeoutError):
        return answer(Refusal(Reason.ENGINE_FAILED, f"The engine did not answer {path}."))
