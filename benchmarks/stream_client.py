"""Clients of an event stream, cheap enough to drive a gate to its limits from one core: bytes are searched, not parsed.

A chunk's text is the time at which the paced engine sent it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast

_TEXT = re.compile(rb'"content":"(\d+)"')
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


@dataclass(slots=True)
class Seen:
    """What the clients of one phase saw; times in ns."""

    ttft_ns: list[int] = field(default_factory=list)
    chunk_ns: list[int] = field(default_factory=list)
    """From the engine's write to the client's read."""
    gap_ns: list[int] = field(default_factory=list)
    together: int = 0
    """Chunks that came in one read with one before them: what a buffer on the way makes."""
    completed: int = 0
    broken: int = 0
    refused: list[int] = field(default_factory=list)
    """From the request's last byte to the answer's."""
    statuses: dict[bytes, int] = field(default_factory=dict)
    counting: bool = False
    """Warm-up is not counted."""


class StreamClient(asyncio.Protocol):
    """One connection, which sends one request after the other."""

    def __init__(self, seen: Seen, idle: deque[StreamClient]) -> None:
        self._seen = seen
        self._idle = idle
        self._asked_ns = self._last_ns = 0
        self._busy = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclass of it

    def ask(self, request: bytes) -> None:
        self._busy, self._asked_ns, self._last_ns, self._tail = True, time.monotonic_ns(), 0, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_ns, seen = time.monotonic_ns(), self._seen
        if not self._last_ns and (status := _STATUS.match(data)) is not None:
            seen.statuses[status[1]] = seen.statuses.get(status[1], 0) + 1
        texts = _TEXT.findall(data)
        if texts:
            if seen.counting:
                seen.together += len(texts) - 1
                for text in texts:
                    seen.chunk_ns.append(now_ns - int(text))
                if self._last_ns:
                    seen.gap_ns.append(now_ns - self._last_ns)
                else:
                    seen.ttft_ns.append(now_ns - self._asked_ns)
            self._last_ns = now_ns
        self._tail = self._tail[-8:] + data[-16:]
        if self._tail.endswith(b"0\r\n\r\n") and b"[DONE]" in data:
            self._busy = False
            seen.completed += 1
            self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._seen.broken += 1

    def close(self) -> None:
        self._busy = False
        self._transport.close()


class Attempt(asyncio.Protocol):
    """One request on a connection of its own, to its end: what a refused client sends."""

    def __init__(self, seen: Seen, request: bytes, ended: asyncio.Future[None]) -> None:
        self._seen = seen
        self._request = request
        self._ended = ended
        self._status = b"none"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclass of it
        self._asked_ns = time.monotonic_ns()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._status == b"none" and (status := _STATUS.match(data)) is not None:
            self._status = status[1]

    def connection_lost(self, exc: Exception | None) -> None:
        seen = self._seen
        if seen.counting:
            seen.statuses[self._status] = seen.statuses.get(self._status, 0) + 1
            if self._status == b"429":
                seen.refused.append(time.monotonic_ns() - self._asked_ns)
        if not self._ended.done():
            self._ended.set_result(None)


def chat(tokens: int, words: int = 40) -> bytes:
    """A streamed chat request, as it goes over the wire."""
    body = b'{"model":"paced","messages":[{"role":"user","content":"%s"}],"max_tokens":%d,"stream":true}' % (
        b"word " * words,
        tokens,
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        b"User-Agent: benchmark\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )


async def connect(url: tuple[str, int] | str, protocol: asyncio.Protocol) -> None:
    """Open one connection: to (host, port), or to the path of a Unix socket."""
    loop = asyncio.get_running_loop()
    if isinstance(url, str):
        await loop.create_unix_connection(lambda: protocol, url)
    else:
        await loop.create_connection(lambda: protocol, *url)


async def streams(url: tuple[str, int] | str, seen: Seen, *, streams: int, interval_s: float, stream_s: float,
                  warm_s: float, measure_s: float, chunks_of: int | None = None) -> None:  # fmt: skip
    """Keep `streams` of `stream_s` each going over warm connections, one starting after the other, evenly."""
    loop = asyncio.get_running_loop()
    idle: deque[StreamClient] = deque()
    # A few more than run at once, so that a stream that ends late holds up nobody.
    clients = [StreamClient(seen, idle) for _ in range(streams + streams // 10 + 4)]
    for client in clients:
        await connect(url, client)
        idle.append(client)
    request = chat(chunks_of or round(stream_s / interval_s))
    started = loop.time()
    due, step_s, end = started, stream_s / streams, started + warm_s + measure_s
    while due < end:
        await asyncio.sleep(max(0.0, due - loop.time()))
        seen.counting = due - started >= warm_s
        if idle:
            idle.popleft().ask(request)
        due += step_s
    seen.counting = False
    for client in clients:
        client.close()


async def attempts(url: tuple[str, int], seen: Seen, *, per_second: float, measure_s: float) -> None:
    """Attempts at an even rate, each on a connection of its own, however slow the answers are."""
    loop = asyncio.get_running_loop()
    request = chat(16)
    open_: set[asyncio.Task[None]] = set()
    due, end = loop.time(), loop.time() + measure_s
    seen.counting = True
    while due < end:
        await asyncio.sleep(max(0.0, due - loop.time()))
        task = loop.create_task(_attempt(url, seen, request))
        open_.add(task)
        task.add_done_callback(open_.discard)
        due += 1 / per_second
    await asyncio.wait(open_, timeout=5) if open_ else None
    seen.counting = False


async def _attempt(url: tuple[str, int], seen: Seen, request: bytes) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await connect(url, Attempt(seen, request, ended))
        await ended
    except OSError:
        seen.statuses[b"none"] = seen.statuses.get(b"none", 0) + 1
