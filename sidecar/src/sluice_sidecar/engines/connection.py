"""HTTP to the engine, whichever it is: one session over a Unix socket or a loopback port.

Owns the connections. Must not know what is asked.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp.connector import AddrInfoType
from yarl import URL

from sluice_sidecar.errors import EngineUnreachable

OK = 200
CONNECT_TIMEOUT_S = 2.0
# Of one answer that its client is slow to take: reading from the engine stops at twice this.
_READ_BUFFER_BYTES: Final = 32 * 1024
# Headers and a body of this size go to the kernel, or into the transport's buffer, in one call.
_WRITTEN_AT_ONCE_BYTES = 32 * 1024
# From here on the library writes a body in parts, between which tokens pass; of bytes alone it warns instead.
_WRITTEN_IN_PARTS_BYTES = 2**20
# A peer that says nothing is asked after half a minute, and is gone half a minute later.
_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
# Behind a Unix socket a host is a name without meaning: the socket is the address.
_SOCKET_ORIGIN = "http://engine"


class EngineConnection:
    """The way to one engine."""

    def __init__(self, connector: aiohttp.BaseConnector, origin: str) -> None:
        self._origin = origin
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER_BYTES,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    @classmethod
    def to_socket(cls, path: str) -> EngineConnection:
        """Over a Unix socket."""
        return cls(aiohttp.UnixConnector(path=path, limit=0), _SOCKET_ORIGIN)

    @classmethod
    def to_url(cls, url: str, *, keep_alive_s: float) -> EngineConnection:
        """Over TCP; a connection idle for `keep_alive_s` is closed before the engine would; 0: each after its use."""
        if keep_alive_s <= 0:
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_probed)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_s, socket_factory=_probed)
        return cls(connector, url.rstrip("/"))

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange with the engine; on leaving, an unfinished one closes its connection, which aborts it there.

        Raises:
            EngineUnreachable: no connection, or it broke before the status line.
        """
        # Encoded already: what a name has of "..", even as %2e%2e, is not to be resolved into another route.
        url = URL(self._origin + path, encoded=True)
        response = await self._sent(method, url, headers, body)
        try:
            yield response
        finally:
            if response.content.at_eof() and response.content.exception() is None:
                response.release()
            else:
                response.close()

    async def _sent(
        self, method: str, url: URL, headers: dict[str, str] | None, body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Its answer begins; asked again, once, where a kept connection had ended before the first byte was sent."""
        for last in (False, True):
            tracker = aiohttp.UploadTracker()
            try:
                data = io.BytesIO(body) if body is not None and len(body) > _WRITTEN_IN_PARTS_BYTES else body
                return await self._session.request(
                    method, url, headers=headers, data=data, allow_redirects=False, upload_tracker=tracker
                )
            except aiohttp.ClientConnectorError as error:
                raise EngineUnreachable(str(error), refused=True) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                if last or not _is_unsent(tracker, body):
                    raise EngineUnreachable(str(error), refused=False) from error
        raise AssertionError("the last attempt returns or raises")

    async def get_json(self, path: str) -> Any:  # noqa: ANN401  # JSON has no narrower type
        """A JSON document of the engine's.

        Raises:
            EngineUnreachable: no answer, or one that is not JSON.
        """
        try:
            async with self.request("GET", path) as response:
                return await response.json()
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise EngineUnreachable(str(error), refused=False) from error

    async def post_json(self, path: str, body: bytes, *, within_s: float) -> Any:  # noqa: ANN401  # likewise
        """The JSON answer to a JSON question; None where there is no good one in time."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(within_s), self.request("POST", path, headers=headers, body=body) as response:
                return await response.json() if response.status == OK else None
        except (EngineUnreachable, TimeoutError, aiohttp.ClientError, ConnectionError, ValueError):
            return None


def _probed(address: AddrInfoType) -> socket.socket:
    """A socket whose peer is asked for a sign of life while it is silent: one that vanished breaks the connection."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        # Not every system has each of them; then its own times hold.
        if (number := getattr(socket, option, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, number, value)
    return made


def _is_unsent(tracker: aiohttp.UploadTracker, body: bytes | None) -> bool:
    """Whether certainly not one byte of the request was written: a second one would then be the only one."""
    # A longer body is written in part before the library knows of a failure.
    if body is None or len(body) > _WRITTEN_AT_ONCE_BYTES or not tracker.upload_complete.done():
        return False
    return tracker.upload_complete.exception() is not None and tracker.bytes_written == 0
