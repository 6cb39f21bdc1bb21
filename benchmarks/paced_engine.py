"""An engine that emits a chunk every so often and does nothing else: a Unix socket, no model, as little work as can be.

Each chunk's text is the time at which it was sent, so that whoever receives it knows how long it was on its way. Its
`/state` lists what runs, as the real one does. Run as a process:
`python paced_engine.py SOCKET INTERVAL_US SLOTS EXTRA_BYTES`, the last of which make each chunk longer.
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
from sluice_engine.core.state import DerivedLimits, EngineState, PoolState, RequestState, StepCost

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"paced","choices":[{"index":0,'
    b'"delta":{"content":"%d"%s},"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"paced","choices":[],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":9}}\n\ndata: [DONE]\n\n'
)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ID = re.compile(rb"x-sluice-request-id: *(\S+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
PROMPT_TOKENS = 50


class PacedEngine:
    """What all connections share: who runs, and the page that says so."""

    def __init__(self, interval_us: int, slots: int, extra_bytes: int) -> None:
        self.interval_s = interval_us / 1e6
        self.extra = b',"extra":"%s"' % (b"x" * extra_bytes) if extra_bytes else b""
        self.running: dict[PacedProtocol, bytes] = {}
        self._seq = 0
        self._state = EngineState(
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
        document = codec.to_json(self._state).encode()
        self._before, self._after = document.split(b'"requests":[]')
        listed = RequestState(
            id="%b", choice=0, status="running", prompt_tokens=PROMPT_TOKENS, computed_tokens=-1, output_tokens=-2,
            max_tokens=-3, blocks=4, incarnation=0, preemptions=0,
        )  # fmt: skip
        request = codec.to_json(listed).encode()
        for stand_in, name in (
            (b"%b", b"%(id)s"),
            (b"-1", b"%(computed)d"),
            (b"-2", b"%(sent)d"),
            (b"-3", b"%(asked)d"),
        ):
            request = request.replace(stand_in, name)
        self._request = request.decode()

    def page(self) -> bytes:
        """`/state`, now."""
        self._seq += 1
        rows = [
            self._request
            % {"id": name.decode(), "computed": PROMPT_TOKENS + one.sent, "sent": one.sent, "asked": one.asked}
            for one, name in self.running.items()
        ]
        after = self._after.replace(b'"running_requests":0', b'"running_requests":%d' % len(rows))
        after = after.replace(b'"seq":1', b'"seq":%d' % self._seq)
        return self._before + b'"requests":[' + ",".join(rows).encode() + b"]" + after


class PacedProtocol(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None
        self.sent = self.asked = 0
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own are no subclass of it

    def connection_lost(self, _: Exception | None) -> None:
        self._engine.running.pop(self, None)
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
            page = self._engine.page()
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(page)
            self._transport.write(head + page)
            return
        tokens, name = _TOKENS.search(request, end), _ID.search(request, 0, end)
        self.asked, self.sent = int(tokens[1]) if tokens else 16, 0
        self._engine.running[self] = name[1] if name else b"direct"
        self._due = self._loop.time()
        self._emit(_HEAD)

    def _emit(self, head: bytes = b"") -> None:
        self.sent += 1
        event = _EVENT % (time.monotonic_ns(), self._engine.extra)
        self._transport.write(b"%s%x\r\n%s\r\n" % (head, len(event), event))
        self._due += self._engine.interval_s
        self._timer = self._loop.call_at(self._due, self._emit if self.sent < self.asked else self._end)

    def _end(self) -> None:
        del self._engine.running[self]
        event = _LAST % self.sent
        self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))


async def serve(path: str, interval_us: int, slots: int, extra_bytes: int) -> None:
    engine = PacedEngine(interval_us, slots, extra_bytes)
    server = await asyncio.get_running_loop().create_unix_server(lambda: PacedProtocol(engine), path, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()  # no pause of ours is to look like one of the gate's
    uvloop.run(serve(sys.argv[1], *map(int, sys.argv[2:5])))
