"""Request bodies: read within bounds, and counted while they are held.

Owns the bytes of all bodies held together. Must not know what is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from sluice_sidecar.errors import Reason, Refusal, Refused

# 8 MiB in this time is 140 KB/s: a phone manages that.
BODY_TIMEOUT_S = 60.0


class HeldBodies:
    """The bytes of all request bodies held together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Count some more; False, and nothing changed, when that would be too much."""
        if self.held_bytes + num_bytes > self._limit_bytes:
            return False
        self.held_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """They are not held any more."""
        self.held_bytes -= num_bytes
        assert self.held_bytes >= 0, "a body was given back twice"


class Body:
    """One request's body, from its first byte until it was passed on."""

    __slots__ = ("_held", "content", "num_bytes")

    def __init__(self, held: HeldBodies) -> None:
        self._held = held
        self.num_bytes = 0
        self.content = b""

    async def read(self, request: web.BaseRequest, limit_bytes: int, busy: Callable[[], Refusal]) -> None:
        """Read it whole; `busy` is asked for the refusal when all bodies together are too much.

        Raises:
            Refused: too large, compressed, too slow, or no room.
        """
        if (request.content_length or 0) > limit_bytes:
            raise Refused(_too_large(limit_bytes))
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            message = f"Bodies with Content-Encoding {encoding!r} are not accepted; send it uncompressed."
            raise Refused(Refusal(Reason.UNSUPPORTED_ENCODING, message))
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        content = request.content
        if content.is_eof() and content.exception() is None:
            # A short one comes with its headers.
            self.content = self._hold(content.read_nowait(), limit_bytes, busy)
            return
        chunks = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while chunk := await content.readany():
                    chunks.append(self._hold(chunk, limit_bytes, busy))
        except TimeoutError as error:
            message = f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s."
            raise Refused(Refusal(Reason.REQUEST_TIMEOUT, message)) from error
        except web.RequestPayloadError as error:
            raise Refused(Refusal(Reason.BAD_REQUEST, "The body's framing is malformed.")) from error
        self.content = b"".join(chunks)

    def _hold(self, chunk: bytes, limit_bytes: int, busy: Callable[[], Refusal]) -> bytes:
        if not self._held.take(len(chunk)):
            raise Refused(busy())
        self.num_bytes += len(chunk)
        if self.num_bytes > limit_bytes:
            raise Refused(_too_large(limit_bytes))
        return chunk

    def drop(self) -> None:
        """Hold it no longer; harmless when repeated."""
        self._held.give_back(self.num_bytes)
        self.num_bytes, self.content = 0, b""


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(Reason.BODY_TOO_LARGE, f"The body is larger than the limit of {limit_bytes} bytes.")
