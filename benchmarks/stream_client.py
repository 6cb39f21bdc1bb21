"""Clients of an event stream, cheap enough to drive a gate to its limits from one core: bytes are searched, not parsed.

A chunk's text is the time at which the paced engine sent it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import cast

_TEXT = re.compile(rb'"content":"(\d+)"')
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")

Address = tuple[str, int] | str
"""(host, port), or the path of a Unix socket."""


@dataclass(slots=True)
class Seen:
    """What the clients of one phase saw; times in ns."""

    counting: bool = False
    """Warm-up is not counted."""
    ttft_ns: list[int] = field(default_factory=list)
    chunk_ns: list[int] = field(default_factory=list)
    """From the engine's write to the client's read."""
    gap_ns: list[int] = field(default_factory=list)
    together: int = 0
    """Chunks that came in one read with one before them: what a buffer on the way makes."""
    broken: int = 0
    refused_ns: list[int] = field(default_factory=list)
    """From the request to the end of the connection."""
    statuses: Counter[str] = field(default_factory=Counter)


class StreamClient(asyncio.Protocol):
    """One connection, which sends one request after the other."""

    def __init__(self, seen: Seen, idle: deque[StreamClient]) -> None:
        self._seen = seen
        self._idle = idle
        self._asked_ns = self._last_ns = 0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclass of it

    def ask(self, request: bytes) -> None:
        self._busy, self._asked_ns, self._last_ns = True, time.monotonic_ns(), 0
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_ns, seen = time.monotonic_ns(), self._seen
        texts = _TEXT.findall(data)
        if texts:
            if seen.counting:
                seen.together += len(texts) - 1
                seen.chunk_ns += [now_ns - int(text) for text in texts]
                seen.gap_ns += [0] * (len(texts) - 1)
                if self._last_ns:
                    seen.gap_ns.append(now_ns - self._last_ns)
                else:
                    seen.ttft_ns.append(now_ns - self._asked_ns)
            self._last_ns = now_ns
        elif (status := _STATUS.match(data)) is not None and status[1] != b"200":
            seen.statuses[status[1].decode()] += 1
        if data.endswith(b"0\r\n\r\n"):
            self._busy = False
            self._idle.append(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._seen.broken += self._busy

    def close(self) -> None:
        self._busy = False
        self._transport.close()


class Attempt(asyncio.Protocol):
    """One request on a connection of its own, to its end: what a refused client sends."""

    def __init__(self, seen: Seen, request: bytes, ended: asyncio.Future[None]) -> None:
        self._seen = seen
        self._request = request
        self._ended = ended
        self._status = "none"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._asked_ns = time.monotonic_ns()
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._status == "none" and (status := _STATUS.match(data)) is not None:
            self._status = status[1].decode()

    def connection_lost(self, _: Exception | None) -> None:
        self._seen.statuses[self._status] += 1
        if self._status == "429":
            self._seen.refused_ns.append(time.monotonic_ns() - self._asked_ns)
        if not self._ended.done():
            self._ended.set_result(None)


def chat(tokens: int, *, extra: bytes = b"") -> bytes:
    """A streamed chat request, as it goes over the wire."""
    body = b'{"model":"paced","messages":[{"role":"user","content":"%s"}],"max_tokens":%d,"stream":true}' % (
        b"word " * 40,
        tokens,
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        b"User-Agent: benchmark\r\n%sContent-Length: %d\r\n\r\n%s" % (extra, len(body), body)
    )


async def connect(address: Address, protocol: asyncio.Protocol) -> None:
    """Open one connection."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        await loop.create_unix_connection(lambda: protocol, address)
    else:
        await loop.create_connection(lambda: protocol, *address)


async def pause_until(due: float) -> None:
    """Sleep to a moment of the loop's clock; at least let others run."""
    await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


async def run_streams(
    address: Address, *, streams: int, tokens: int, stream_s: float, warm_s: float, measure_s: float
) -> Seen:
    """Keep `streams` of `stream_s` going over warm connections, one starting after the other, evenly."""
    loop, seen, idle = asyncio.get_running_loop(), Seen(), deque[StreamClient]()
    # A few more than run at once, so that a stream that ends late holds up nobody.
    clients = [StreamClient(seen, idle) for _ in range(streams + streams // 10 + 4)]
    for client in clients:
        await connect(address, client)
        idle.append(client)
    request, started, rng = chat(tokens), loop.time(), random.Random(1)
    due, end = started, started + warm_s + measure_s
    while due < end:
        await pause_until(due)
        seen.counting = due - started >= warm_s
        if idle:
            idle.popleft().ask(request)
        # Not in step with the chunks, or half of all streams would have theirs at the same moment.
        due += rng.uniform(0.5, 1.5) * stream_s / streams
    seen.counting = False
    for client in clients:
        client.close()
    return seen


async def attempt_evenly(address: Address, *, per_second: float, measure_s: float) -> Seen:
    """Attempts at an even rate, each on a connection of its own, however slow the answers are."""
    loop, seen = asyncio.get_running_loop(), Seen()
    # Who is let in by chance gives its place back at once.
    request = chat(1, extra=b"Connection: close\r\n")
    going: set[asyncio.Task[None]] = set()
    due, end = loop.time(), loop.time() + measure_s
    while due < end:
        await pause_until(due)
        task = loop.create_task(_attempt(address, seen, request))
        going.add(task)
        task.add_done_callback(going.discard)
        due += 1 / per_second
    if going:
        await asyncio.wait(going, timeout=10)
    return seen


async def _attempt(address: Address, seen: Seen, request: bytes) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await connect(address, Attempt(seen, request, ended))
        await ended
    except OSError:
        seen.statuses["none"] += 1
