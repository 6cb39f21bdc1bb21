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
        too_large = Refusal(Reason.BODY_TOO_LARGE, f"The body is larger than the limit of {limit_bytes} bytes.")
        if (request.content_length or 0) > limit_bytes:
            raise Refused(too_large)
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            message = f"Bodies with Content-Encoding {encoding!r} are not accepted; send it uncompressed."
            raise Refused(Refusal(Reason.UNSUPPORTED_ENCODING, message))
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        chunks = []
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while chunk := await request.content.readany():
                    if not self._held.take(len(chunk)):
                        raise Refused(busy())
                    self.num_bytes += len(chunk)
                    if self.num_bytes > limit_bytes:
                        raise Refused(too_large)
                    chunks.append(chunk)
        except TimeoutError as error:
            message = f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s."
            raise Refused(Refusal(Reason.REQUEST_TIMEOUT, message)) from error
        except web.RequestPayloadError as error:
            raise Refused(Refusal(Reason.BAD_REQUEST, "The body's framing is malformed.")) from error
        self.content = b"".join(chunks)

    def drop(self) -> None:
        """Hold it no longer; harmless when repeated."""
        self._held.give_back(self.num_bytes)
        self.num_bytes, self.content = 0, b""
