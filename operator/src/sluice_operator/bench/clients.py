"""Clients of a server that speaks OpenAI's chat API: each streams its answers and keeps the time of every event.

Who is refused comes back when he was told to, as OpenAI's own clients do. Next: `answers.py`, the figures.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http import HttpProcessingError

from sluice_operator.bench.answers import Answer
from sluice_operator.errors import InvalidSettings, Unreachable

_OK = 200
_LONGEST_WAIT_S = 60.0
# Of an answer that is no stream of events: enough for any error object.
_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request asks for."""

    model: str = ""
    """Empty: what `Clients.model` is set to."""
    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    """Answers of exactly `max_tokens`, by a field that vLLM knows and OpenAI's own service does not."""
    retries: int = 2
    """How often a refused request comes back, when it was told to."""
    headers: Mapping[str, str] = field(default_factory=dict)


class Clients:
    """Sends requests to one server; an asynchronous context manager that holds its connections."""

    def __init__(self, url: str, asked: Asked, *, uds: str | None = None) -> None:
        """`url` without a route, as `server_url` gives it; `uds` reaches a server's Unix socket instead of its host."""
        self.model = asked.model
        self._url = url
        self._asked = asked
        self._uds = uds

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(path=self._uds, limit=0) if self._uds else aiohttp.TCPConnector(limit=0)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers=dict(self._asked.headers),
            trace_configs=[trace],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def closed_loop(self, prompts: Iterator[str], clients: int, seen: list[Answer]) -> None:
        """`clients` at once until the prompts end: each asks again when its answer has ended."""

        async def client() -> None:
            for text in prompts:
                await self.ask(text, seen)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def open_loop(
        self, prompts: Iterator[str], per_second: float, rng: random.Random, seen: list[Answer]
    ) -> None:
        """Requests at random moments, `per_second` in the mean, however many are on their way."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for text in prompts:
                await asyncio.sleep(max(0.0, due - loop.time()))
                group.create_task(self.ask(text, seen))
                due += rng.expovariate(per_second)

    async def ask(self, text: str, seen: list[Answer], max_tokens: int | None = None) -> None:
        """One request to its end, refusals that may be tried again included; its answer is added to `seen`."""
        answer, attempts = Answer(), 0
        while True:
            attempts += 1
            answer = Answer(attempts=attempts)
            try:
                wait_s = await self._attempt(text, answer, max_tokens or self._asked.max_tokens)
            except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
                answer.code, wait_s = f"connection: {type(error).__name__}", None
            if wait_s is None or attempts > self._asked.retries:
                break
            await asyncio.sleep(wait_s)
        seen.append(answer)

    async def _attempt(self, text: str, answer: Answer, max_tokens: int) -> float | None:
        """Fill `answer`; seconds after which to come back, None where that is not asked for."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": self._asked.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._asked.ignore_eos:
            body["ignore_eos"] = True
        started_us = _now_us()
        async with await self._post(body) as response:
            answer.status = response.status
            if response.status != _OK:
                answer.code = _error_code(await response.content.read(_BODY_BYTES)) or f"http_{response.status}"
                return _wait_s(response.headers) if answer.is_refused else None
            await _follow(response, answer, started_us)
        answer.latency_us = _now_us() - started_us
        return None

    async def _post(self, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """The answer's head; once more where a connection that was kept turns out to be closed before any byte.

        A server may end a kept connection while the next request is on its way there: that is no failure of either.
        """
        url, connection = f"{self._url}/v1/chat/completions", _Connection()
        try:
            return await self._session.post(url, json=body, trace_request_ctx=connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as error:
            # What is no text is the part of a head that had come.
            begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if not connection.reused or begun:
                raise
        return await self._session.post(url, json=body)

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            Unreachable: nobody answers, or what answers is no such server.
        """
        url = f"{self._url}/v1/models"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                body = await response.content.read(_BODY_BYTES)
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            raise Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
        if response.status != _OK:
            raise Unreachable(f"{url}: HTTP {response.status}: {_error_code(body) or 'no list of models'}")
        try:
            name = json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            name = None
        if not isinstance(name, str) or not name:
            raise Unreachable(f"{url}: no list of models; --model names one")
        return name


def server_url(text: str) -> str:
    """The server's address, to which routes are added: a path before `/v1` stays, as behind a gateway.

    Raises:
        InvalidSettings: it is no such address.
    """
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises for one that is none
    except ValueError as error:
        raise InvalidSettings(f"{text} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidSettings(f"{text} is no URL of a server, such as http://127.0.0.1:8080")
    if parts.query or parts.fragment or parts.username:
        raise InvalidSettings(f"{text}: give the address alone, such as {parts.scheme}://{parts.hostname}:8080")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@dataclass(slots=True)
class _Connection:
    """What carried a request."""

    reused: bool = False
    """It had carried others before."""


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(connection := context.trace_request_ctx, _Connection):
        connection.reused = True


async def _follow(response: aiohttp.ClientResponse, answer: Answer, started_us: int) -> None:
    """Read a stream of events to its end."""
    last_us: int | None = None
    answer.code = "stream_cut"
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now_us, payload = _now_us(), line[5:].strip()
        if payload == b"[DONE]":
            # An answer that ended in an error event ended all the same.
            answer.code = "" if answer.code == "stream_cut" else answer.code
            continue
        event = _json_object(payload)
        if event.get("error"):
            answer.code = _error_code(payload) or "stream_error"
        elif _has_text(event):
            if not answer.is_counted:
                answer.output_tokens += 1
            if last_us is None:
                answer.ttft_us = now_us - started_us
            else:
                answer.gaps_us.append(now_us - last_us)
            last_us = now_us
        match event.get("usage"):
            case {"prompt_tokens": int(prompt_tokens), "completion_tokens": int(output_tokens)}:
                answer.prompt_tokens, answer.output_tokens, answer.is_counted = prompt_tokens, output_tokens, True


def _has_text(event: Mapping[str, Any]) -> bool:
    match event:
        case {"choices": [{"delta": dict(delta)}, *_]}:
            return any(delta.get(part) for part in ("content", "reasoning_content", "tool_calls", "refusal"))
    return False


def _json_object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _error_code(body: bytes) -> str:
    """The code of OpenAI's error object, else its type; empty where there is none."""
    error = _json_object(body).get("error")
    said = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((str(one) for one in said if one and isinstance(one, str | int)), "")


def _wait_s(headers: Mapping[str, str]) -> float | None:
    """When a refusal says to come back; None where it says not to, or nothing that can be waited for."""
    if headers.get("x-should-retry", "").lower() == "false":
        return None
    try:
        wait_s = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(wait_s, _LONGEST_WAIT_S) if wait_s >= 0 and math.isfinite(wait_s) else None


def _now_us() -> int:
    return time.monotonic_ns() // 1000
