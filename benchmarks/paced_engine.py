"""An engine that emits a chunk every so often and does nothing else: a Unix socket, no model, as little work as can be.

Each chunk's text is the clock's time at which it was sent, so that whoever receives it knows how long it was on its way.
Run as a process: `python paced_engine.py SOCKET INTERVAL_US SLOTS`.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
from typing import cast

import uvloop

from sluice_engine import codec
from sluice_engine.core.state import DerivedLimits, EngineState, PoolState, StepCost

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"paced","choices":[{"index":0,'
    b'"delta":{"content":"%d"},"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"paced","choices":[],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":9}}\n\ndata: [DONE]\n\n'
)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')


def state(slots: int) -> EngineState:
    """Room enough for everything but more than `slots` requests at once."""
    return EngineState(
        schema_version="1.0",
        boot_id="paced",
        seq=1,
        phase="ready",
        model="paced",
        max_length_tokens=8192,
        pool=PoolState(block_tokens=16, total_blocks=1_000_000, free_blocks=1_000_000),
        derived=DerivedLimits(
            feasible=True,
            chunk_ceiling_tokens=100_000,
            token_budget=100_000,
            max_sequences=slots,
            kv_capacity_tokens=16_000_000,
        ),
        step_cost=StepCost(fixed_us=100, decode_us=100, per_prefill_token_ns=1),
        decode_curve_us=((1, 100), (slots, 100)),
    )


class PacedProtocol(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, interval_s: float, page: bytes) -> None:
        self._interval_s = interval_s
        self._page = page
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None
        self._left = self._sent = 0
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        length = _LENGTH.search(self._data, 0, end)
        whole = end + (int(length[1]) if length else 0)
        if len(self._data) < whole:
            return
        request, self._data = self._data[:whole], self._data[whole:]
        if request.startswith(b"GET"):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(self._page)
            self._transport.write(head + self._page)
            return
        tokens = _TOKENS.search(request, end)
        self._left, self._sent = int(tokens[1]) if tokens else 16, 0
        self._due = self._loop.time()
        self._emit(_HEAD)

    def _emit(self, head: bytes = b"") -> None:
        self._left -= 1
        self._sent += 1
        event = _EVENT % time.monotonic_ns()
        self._transport.write(b"%s%x\r\n%s\r\n" % (head, len(event), event))
        self._due += self._interval_s
        self._timer = self._loop.call_at(self._due, self._emit if self._left > 0 else self._end)

    def _end(self) -> None:
        event = _LAST % self._sent
        self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))


async def serve(path: str, interval_us: int, slots: int) -> None:
    page = codec.to_json(state(slots)).encode()
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: PacedProtocol(interval_us / 1e6, page), path, backlog=4096
    )
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()  # no pause of ours is to look like one of the gate's
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
