"""`/tokenize` and `/detokenize`: the engine's own answers, a few at a time. They take none of its steps, only its CPU.

Must not know admission's room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal, Refused
from sluice_sidecar.web.body import Body
from sluice_sidecar.web.listener import SERVER, answer

PATHS = ("/tokenize", "/detokenize")
# The engine's pool of tokenizing threads is two, and the gate's own counts come before.
MOST_AT_ONCE = 4
_TIMEOUT_S = 30.0


class Tokenizing:
    """The two routes, and who is on them."""

    def __init__(self, engine: EngineLink, busy: Callable[[], Refusal]) -> None:
        """`busy` is asked for the refusal of one that comes while as many as may be are there."""
        self._engine = engine
        self._busy = busy
        self._inside = 0

    async def handle(
        self, request: web.BaseRequest, body: Body, read: Callable[[Body], Awaitable[None]]
    ) -> web.Response:
        """The engine's answer; `read` fills the body, which is held no longer than this takes.

        Raises:
            Refused: too many ask, or the body cannot be had.
        """
        try:
            # A client may take its time over this: it holds nobody up meanwhile.
            await read(body)
            if self._inside >= MOST_AT_ONCE:
                raise Refused(self._busy())
            self._inside += 1
            try:
                return await self._asked(request.path, body.content)
            finally:
                self._inside -= 1
        finally:
            body.drop()

    async def _asked(self, path: str, content: bytes) -> web.Response:
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._engine.request("POST", path, headers=headers, body=content) as upstream,
            ):
                return web.Response(
                    status=upstream.status,
                    body=await upstream.read(),
                    content_type="application/json",
                    headers={"Server": SERVER},
                )
        except (EngineUnreachable, aiohttp.ClientError, ConnectionError, TimeoutError):
            return answer(Refusal(Reason.ENGINE_FAILED, f"The engine did not answer {path}."))
