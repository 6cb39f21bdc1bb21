"""`/tokenize` and `/detokenize`: the engine's own answers, a few at a time. They take none of its steps, only its CPU.

Must not know admission's room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import Refusal, Refused
from sluice_sidecar.pages import passed_on
from sluice_sidecar.web.body import Body

PATHS = ("/tokenize", "/detokenize")
# The engine's pool of tokenizing threads is two, and the gate's own counts come before.
MOST_AT_ONCE = 4
# A tokenizer takes some 150 bytes of memory for each byte of a text, which is the engine's.
MOST_BYTES = 1024 * 1024
_TIMEOUT_S = 30.0
_HEADERS = {"Content-Type": "application/json"}


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
                exchange = self._engine.request("POST", request.path, headers=_HEADERS, body=body.content)
                return await passed_on(exchange, request.path, _TIMEOUT_S)
            finally:
                self._inside -= 1
        finally:
            body.drop()
