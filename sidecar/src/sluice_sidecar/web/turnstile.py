"""A connection in a storm: most are answered from their first bytes; the others get a protocol as on any day.

Owns a connection until its first bytes are in. Must not know admission: the answer is asked for.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from sluice_sidecar.errors import Refusal

# One whose body is still coming is heard out for this long, so that it sees its answer and not a reset.
LINGER_S = 1.0
# Who says nothing costs a connection; in a storm it is not kept long.
SILENCE_S = 10.0
_GENERATES = (b"POST /v1/chat/completions ", b"POST /v1/completions ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,12}) *\r\n", re.IGNORECASE)


class Turnstile(asyncio.Protocol):
    """One new connection while there is a storm."""

    def __init__(
        self,
        refuse: Callable[[str | None], Refusal | None],
        protocol: Callable[[], asyncio.Protocol],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`refuse` tells what a peer is told, None when it has to be heard; `protocol` makes what hears it."""
        self._refuse = refuse
        self._protocol = protocol
        self._loop = loop
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first bytes."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(SILENCE_S, self._transport.close)

    def data_received(self, data: bytes) -> None:
        """Answer, or hand over; what comes after an answer is dropped."""
        if self._answered:
            return
        end = data.find(b"\r\n\r\n") + 4
        if end >= 4 and data.startswith(_GENERATES):
            peer = self._transport.get_extra_info("peername")
            if (refusal := self._refuse(peer[0] if peer else None)) is not None:
                self._answer(refusal, data, end)
                return
        self._timer.cancel()
        protocol = self._protocol()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def connection_lost(self, _: Exception | None) -> None:
        """Nothing is left to wait for."""
        self._timer.cancel()

    def _answer(self, refusal: Refusal, data: bytes, end: int) -> None:
        self._answered = True
        self._transport.write(raw(refusal))
        length = _LENGTH.search(data, 0, end)
        self._timer.cancel()
        if length is not None and len(data) >= end + int(length[1]):
            self._transport.close()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._transport.close)
            self._transport.write_eof()


def raw(refusal: Refusal) -> bytes:
    """A refusal as the bytes of an HTTP response that ends its connection."""
    body = json.dumps(refusal.body()).encode()
    headers = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers().items())
    status = HTTPStatus(refusal.status)
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{headers}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
