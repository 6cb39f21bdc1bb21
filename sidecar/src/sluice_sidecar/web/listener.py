"""The gate's HTTP server below the routes: connections, their limits, and errors as OpenAI error objects.

Owns what a client can do before a request exists: slow headers, malformed bytes, half-open connections. Must not know
admission. Built on aiohttp's low-level server, so that no framework answers in a shape of its own.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol, cast

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.web.turnstile import Turnstile, raw

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# A header block is a few packets; who needs longer holds the connection, not the prompt.
HEADER_TIMEOUT_S = 10.0
# Above the idle reuse of common gateways (60 s), so that they and not we close an idle connection.
KEEPALIVE_TIMEOUT_S = 75.0
# After an early refusal the rest of a body is read and dropped for this long, so that the client sees the answer.
LINGER_S = 2.0
BACKLOG = 1024
MAX_HEADER_BYTES = 16_384
MAX_HEADERS = 128
# All of them together, and what is read beyond: one read of the socket may bring more at once.
MAX_HEADER_BLOCK_BYTES = 65_536
# As long as a body has to come: six megabytes of token ids in this time are 100 KB/s. A stream's own watch is stricter.
ANSWER_TIMEOUT_S = 60.0
# A stalled reader costs this much memory here, and then its stream stops.
WRITE_BUFFER_BYTES = 32 * 1024
SERVER = "sluice-gate"


def answer(refusal: Refusal, extra: dict[str, str] | None = None) -> web.Response:
    """A refusal as an HTTP response."""
    response = web.Response(
        status=refusal.status,
        body=json.dumps(refusal.body()).encode(),
        content_type="application/json",
        headers={**refusal.headers(), **(extra or {}), "Server": SERVER},
    )
    if refusal.closes_connection or refusal.reason in {Reason.BODY_TOO_LARGE, Reason.REQUEST_TIMEOUT}:
        response.force_close()
    return response


def plain(problem: str | None) -> web.Response:
    """A probe's answer: 503 with the problem, or 200."""
    return web.Response(status=200 if problem is None else 503, text=f"{problem or 'ok'}\n", headers={"Server": SERVER})


def parser_is_compiled() -> bool:
    """Whether HTTP is read by aiohttp's C parser: the faster one, and the one that most of the world tests."""
    return HttpRequestParser is not HttpRequestParserPy


def framing_problem(request: web.BaseRequest) -> str | None:
    """Why another reader of the same bytes may see another request in them, or none; None when they are plain.

    What the parsers refuse themselves is not among it.
    """
    if request.version not in {HttpVersion10, HttpVersion11}:
        return f"HTTP/{request.version.major}.{request.version.minor} is not spoken here"
    codings = request.headers.getall("Transfer-Encoding", [])
    if codings and (request.version == HttpVersion10 or [coding.strip().lower() for coding in codings] != ["chunked"]):
        return "Transfer-Encoding can be chunked, once, and in HTTP/1.1 only"
    if sum(len(name) + len(value) + 4 for name, value in request.raw_headers) > MAX_HEADER_BLOCK_BYTES:
        return f"The headers are longer than {MAX_HEADER_BLOCK_BYTES} bytes together"
    return None


class GateProtocol(web.RequestHandler):
    """One connection."""

    __slots__ = ("_header_bytes", "_header_timer", "_unread_timer", "_user_timeout_ms")

    def __init__(
        self,
        server: web.Server,
        *,
        user_timeout_ms: int,
        loop: asyncio.AbstractEventLoop,
        **kwargs: Any,  # noqa: ANN401  # aiohttp's own
    ) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._user_timeout_ms = user_timeout_ms
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what a dead peer and a slow reader can hold."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            # Sent bytes that nobody acknowledges for this long end the connection.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._user_timeout_ms)
            # What the kernel holds beyond what is on its way: a slow reader's share is ours, not the kernel's 4 MiB.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        # Who connects and says nothing is not kept longer than one who has said something.
        self._start_header_timer(KEEPALIVE_TIMEOUT_S)
        # Asked for by what it can do: uvloop's transports are no subclass of asyncio's.
        cast("asyncio.WriteTransport", transport).set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """Start the clock on a header block that came in part; stop it once a request is whole."""
        super().data_received(data)
        # Under uvloop bytes can come before the task that waits for a connection's first request has begun to wait.
        first = self._request_count == 0
        waiting = not self._messages and (first or (self._waiter is not None and not self._waiter.done()))
        if not waiting:
            self._stop_header_timer()
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BLOCK_BYTES:
            self._give_up(Reason.BAD_REQUEST, f"The request's headers are longer than {MAX_HEADER_BLOCK_BYTES} bytes.")
        elif data and (self._header_timer is None or self._header_bytes == len(data)):
            self._start_header_timer(HEADER_TIMEOUT_S)

    def pause_writing(self) -> None:
        """Start the clock on a client that does not read what is ready for it."""
        super().pause_writing()
        if self.transport is not None:
            after_s = max(ANSWER_TIMEOUT_S, self._user_timeout_ms / 1000)
            self._unread_timer = self._loop.call_later(after_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the clock: nearly all of it was read."""
        self._stop_unread_timer()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the clocks."""
        self._stop_header_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Malformed requests and our own bugs, as OpenAI error objects; only the latter are logged."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the answer has begun, or there is nobody to hear it") from exc
        if status == HTTPStatus.BAD_REQUEST:
            detail = (message or "").strip().splitlines()
            refusal = Refusal(
                Reason.BAD_REQUEST, f"The request is not valid HTTP: {detail[0] if detail else 'malformed'}"
            )
        elif status == HTTPStatus.GATEWAY_TIMEOUT:
            refusal = Refusal(Reason.REQUEST_TIMEOUT, "The request timed out.")
        else:
            log.error("request handler failed", exc_info=exc)
            refusal = Refusal(Reason.INTERNAL_ERROR, "The gate failed to handle this request; it has been logged.")
        response = answer(refusal)
        response.force_close()
        return response

    def _start_header_timer(self, after_s: float) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self._loop.call_later(after_s, self._header_timeout, after_s)

    def _stop_header_timer(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _header_timeout(self, after_s: float) -> None:
        self._header_timer = None
        if self._header_bytes:
            self._give_up(Reason.REQUEST_TIMEOUT, f"The request's headers did not arrive within {after_s:.0f} s.")
        else:
            self.force_close()

    def _give_up(self, reason: Reason, message: str) -> None:
        """End the connection before there is a request to answer."""
        self._stop_header_timer()
        if self.transport is not None:
            self.transport.write(raw(Refusal(reason, message)))
            self.force_close()


class Door(Protocol):
    """What the listener asks before it reads."""

    @property
    def storm(self) -> bool:
        """Whether new connections are answered from their first bytes where that is possible."""
        ...

    def refuse_unheard(self, peer: str | None) -> Refusal | None:
        """What a peer is told whose request was not read; None when it has to be."""
        ...


class GateServer(web.Server):
    """Makes a protocol of each connection."""

    def __init__(self, handler: Handler, *, user_timeout_ms: int, door: Door | None = None) -> None:
        super().__init__(self._plain_only(handler), handler_cancellation=True)
        self._user_timeout_ms = user_timeout_ms
        self._door = door

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        if self._door is not None and self._door.storm:
            # Asyncio asks for any protocol; aiohttp's signature is narrower.
            return cast("web.RequestHandler", Turnstile(self._door.refuse_unheard, self._protocol, self._loop))
        return self._protocol()

    @staticmethod
    def _plain_only(handler: Handler) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            problem = framing_problem(request)
            if problem is None:
                return await handler(request)
            response = answer(Refusal(Reason.BAD_REQUEST, f"The request's framing is not accepted: {problem}."))
            response.force_close()
            return response

        return handle

    def _protocol(self) -> GateProtocol:
        return GateProtocol(
            self,
            user_timeout_ms=self._user_timeout_ms,
            loop=self._loop,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            lingering_time=LINGER_S,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            # Bodies are forwarded as they came; a compressed one is refused by name.
            auto_decompress=False,
            access_log=None,
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; dual-stack for "::", and IPv4 only where the kernel has no IPv6.

    Raises:
        OSError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = host
    if host == "::" and not _has_ipv6():
        family, address = socket.AF_INET, "0.0.0.0"  # noqa: S104  # what "::" asks for
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, os.strerror(error.errno or 0), f"{host}:{port}") from error
    return sock


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError as error:
        return error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
    return True
