"""Answers below the routes: JSON, event streams, and the one place where errors become answers."""

from __future__ import annotations

import contextlib
import json
import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from sluice_engine.errors import BodyTooLarge, InvalidRequest, MethodNotAllowed, NotFound, RequestError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
REQUEST_ID_HEADER = "x-sluice-request-id"
REQUEST_ID = web.RequestKey("request_id", str)
# What proxies log for a caller that closed the connection; it is never seen by one.
CLIENT_LEFT = 499


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
    except Exception:
        log.exception("request failed", extra={"path": request.path})
        answer = RequestError("internal error")
    with contextlib.suppress(KeyError):
        return _error(answer, request[REQUEST_ID])
    return _error(answer)
