"""Where records come from: the admin port of a running gate, or a file that holds what one said.

Owns the HTTP client, the bounds on what is read, and the one line about what is wrong with it. A file is a JSON object
with `steps` and `requests` as `/steps` gives them and, where they are there, `state` and `decisions`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sluice_engine import codec
from sluice_engine.core.ended import EndedRequest
from sluice_engine.core.state import is_readable
from sluice_engine.errors import InvalidConfig
from sluice_operator.errors import InvalidRecords, InvalidSettings, Unreachable
from sluice_operator.records.steps import Step, read_steps
from sluice_sidecar.telemetry.decisions import Decision
from sluice_sidecar.telemetry.state import SCHEMA_VERSION, GateState

MOST_STEPS = 4096
MOST_DECISIONS = 4096
_TIMEOUT = aiohttp.ClientTimeout(total=20, connect=5)
# 4,096 steps of a thousand requests each are below this; beyond it is no record.
_LIMIT_BYTES = 1024 * 1024 * 1024
_OK, _NOT_FOUND = 200, 404
# Of the message in an error: more is no line for a person.
_MOST_SAID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a pod said, oldest first."""

    steps: list[Step]
    state: GateState | None = None
    decisions: tuple[Decision, ...] = ()
    ended: tuple[EndedRequest, ...] = ()
    """Choices that have ended."""
    now_us: int | None = None
    """When it said so, on its own clock."""


def is_url(source: str) -> bool:
    """Whether a source names a server, not a file."""
    return "://" in source


def base_url(text: str) -> str:
    """The address of an admin port, without a path.

    Raises:
        InvalidSettings: it is no such address.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidSettings(f"{text} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidSettings(f"{text} is no URL of a gate's admin port, such as http://127.0.0.1:9090")
    if parts.path.strip("/") or parts.query or parts.username:
        raise InvalidSettings(f"{text}: give the admin port alone, such as {parts.scheme}://{parts.hostname}:9090")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def read(source: str) -> Records:
    """Everything that a gate or a file has.

    Raises:
        InvalidSettings: the source is no URL and no file that can be read.
        Unreachable: nobody answers there, or it is no gate's admin port.
        InvalidRecords: what is there is no record.
    """
    return asyncio.run(_fetched(base_url(source))) if is_url(source) else _from_file(source)


async def _fetched(url: str) -> Records:
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        state = await fetch_state(session, url)
        steps = await _get(session, url, f"/steps?last={MOST_STEPS}")
        _member(steps, "steps")
        decisions = await _get(session, url, f"/decisions?last={MOST_DECISIONS}", missing_is_none=True)
    return records({**steps, "state": state, **(decisions or {})}, url)


def state_of(url: str) -> GateState:
    """The state of the gate whose admin port is at `url`.

    Raises:
        Unreachable: nobody answers, or it is no gate's admin port.
    """

    async def fetch() -> GateState:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            return await fetch_state(session, url)

    return asyncio.run(fetch())


async def fetch_state(session: aiohttp.ClientSession, url: str) -> GateState:
    """The gate's state.

    Raises:
        Unreachable: nobody answers, or it is no gate's admin port.
    """
    document = await _get(session, url, "/state")
    try:
        return _state(document)
    except (InvalidRecords, InvalidConfig) as error:
        raise Unreachable(f"{url} is no gate's admin port that this sluice can read: {error}") from error


async def fetch_steps(session: aiohttp.ClientSession, url: str, count: int) -> list[Step]:
    """The last few steps; none while the engine does not answer."""
    try:
        document = await _get(session, url, f"/steps?last={count}")
    except Unreachable:
        return []
    return read_steps(_member(document, "steps"))


async def _get(session: aiohttp.ClientSession, url: str, path: str, *, missing_is_none: bool = False) -> Any:  # noqa: ANN401  # parsed JSON
    try:
        async with session.get(url + path) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > _LIMIT_BYTES:
                    raise Unreachable(f"{url}{path} answers without an end")
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise Unreachable(f"{url} does not answer: {_why(error)}") from error
    if status == _NOT_FOUND and missing_is_none:
        return None
    try:
        document = codec.loads(bytes(content))
    except (ValueError, RecursionError):
        document = None
    if status == _OK and document is not None:
        return document
    said = _message(document)
    if status == _NOT_FOUND:
        raise Unreachable(
            f"{url} has no {path.partition('?')[0]}: is it a gate's admin port (9090), not its public one?"
        )
    said = said or ("something that is no JSON" if status == _OK else "")
    raise Unreachable(f"{url}{path.partition('?')[0]} answers {status}{f': {said}' if said else ''}")


def _message(document: Any) -> str:  # noqa: ANN401  # parsed JSON
    """What an error object of OpenAI's says; empty where there is none: whatever listens there may have answered."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:_MOST_SAID] if isinstance(message, str) else ""


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it takes too long"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _from_file(source: str) -> Records:
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not text in UTF-8"
        raise InvalidSettings(f"{source} cannot be read: {problem}") from error
    try:
        document = codec.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRecords(f"{source} is not JSON: {error}") from error
    return records(document, source)


def records(document: Any, where: str) -> Records:  # noqa: ANN401  # parsed JSON
    """The records of a document with `steps`, and `state` and `decisions` where they are there.

    Raises:
        InvalidRecords: it is something else; the text begins with `where`.
    """
    try:
        state = document.get("state") if isinstance(document, dict) else None
        return Records(
            steps=read_steps(_member(document, "steps")),
            state=state if state is None or isinstance(state, GateState) else _state(state),
            decisions=tuple(
                codec.decode(Decision, item, f"decisions[{index}]", ignore_unknown=True)
                for index, item in enumerate(_member(document, "decisions") if "decisions" in document else ())
            ),
            ended=tuple(
                codec.decode(EndedRequest, item, f"requests[{index}]", ignore_unknown=True)
                for index, item in enumerate(_member(document, "requests") if "requests" in document else ())
            ),
            now_us=document.get("now_us"),
        )
    except (InvalidRecords, InvalidConfig) as error:
        raise InvalidRecords(f"{where}: {error}") from error


def _member(document: Any, name: str) -> list[Any]:  # noqa: ANN401
    found = document.get(name) if isinstance(document, Mapping) else None
    if not isinstance(found, list):
        raise InvalidRecords(f"there is no list of {name} in it")
    return found


def _state(document: Any) -> GateState:  # noqa: ANN401
    state = codec.decode(GateState, document, "state", ignore_unknown=True)
    if not is_readable(state.schema_version, SCHEMA_VERSION):
        raise InvalidRecords(f"state has the version {state.schema_version}, which this sluice does not read")
    return state
