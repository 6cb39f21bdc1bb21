"""Answers below the routes: JSON, event streams, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.typedefs import Handler

from sluice_engine.bodies import TOO_DEEP
from sluice_engine.errors import (
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestError,
    RequestTimedOut,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
# As the gate's. It sends what it has whole, and so does the pod's own probe: only who is broken takes longer.
BODY_TIMEOUT_S = 60.0
# Four times the gate's, which is to be the first to give up a client that reads nothing, and knows whom it was.
STALL_TIMEOUT_S = 120.0
REQUEST_ID_HEADER = "x-sluice-request-id"
REQUEST_ID = web.RequestKey("request_id", str)
# What proxies log for a caller that closed the connection; it is never seen by one.
CLIENT_LEFT = 499


async def body_of(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        RequestTimedOut: it did not come in time.
        HTTPRequestEntityTooLarge: it is larger than `MAX_BODY_BYTES`.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimedOut(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error


class EventWriter:
    """Where the frames of a stream go that has begun. A reader that takes none for too long is cut off."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        writer = request.writer
        assert isinstance(writer, StreamWriter), "aiohttp's own, of a request that came over a connection"
        self._request = request
        self._response = response
        self._writer = writer

    async def write(self, data: bytes) -> None:
        """Send, and wait while the reader is behind.

        Raises:
            ConnectionError: it has left, or reads nothing.
        """
        # As the response's own would, which waits for ever and only now and then.
        await self._writer.write(data, drain=False)
        if self._request.protocol.writing_paused:
            await self._patiently(self._writer.drain())

    async def end(self) -> None:
        """Send the end of the body.

        Raises:
            ConnectionError: as `write`.
        """
        await self._patiently(self._response.write_eof())

    async def _patiently(self, sent: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                await sent
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionError("the reader takes nothing of what is sent") from error


def event_stream(request_id: str) -> web.StreamResponse:
    """A stream of events that has not begun."""
    return web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            REQUEST_ID_HEADER: request_id,
        }
    )


def _error(error: RequestError, request_id: str | None = None) -> web.Response:
    response = json_response(error.body(), request_id, error.status)
    if error.should_retry is not None:
        response.headers["x-should-retry"] = "true" if error.should_retry else "false"
    return response


def json_response(body: object, request_id: str | None = None, status: int = 200) -> web.Response:
    """A whole answer."""
    return web.Response(
        status=status,
        body=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
        headers={
            "Content-Type": "application/json",
            **({REQUEST_ID_HEADER: request_id} if request_id is not None else {}),
        },
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as an OpenAI error object."""
    try:
        return await handler(request)
    except RequestError as error:
        answer = error
    except web.HTTPRequestEntityTooLarge:
        answer = BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = MethodNotAllowed(f"the route {request.path} takes {allowed}, not {request.method}")
    except web.HTTPNotFound:
        answer = NotFound(f"there is no {request.path[:100]} here")
    except web.HTTPException as error:
        answer = InvalidRequest(error.reason)
    except ConnectionError:
        return web.Response(status=CLIENT_LEFT)  # there is nobody to answer
    except RecursionError:
        # It could just be read, and what is done with it goes a few calls deeper.
        answer = InvalidRequest(TOO_DEEP, code="invalid_json")
    except Exception:
        log.exception("request failed", extra={"path": request.path})
        answer = RequestError("internal error")
    with contextlib.suppress(KeyError):
        return _error(answer, request[REQUEST_ID])
    return _error(answer)
