"""One admitted request's way to the engine and back: bytes are copied, times are taken, and every end is an outcome.

Owns the stream between client and engine. No header goes out before the engine's status is known; what breaks later
ends in an SSE error event, or in broken framing, never in a clean end. Must not decide about admission.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from sluice_sidecar.admission import MISSED, Admission
from sluice_sidecar.call import PATHS, Call
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.config import GateConfig
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_sidecar.telemetry.recorder import Recorder
from sluice_sidecar.web import events, headers
from sluice_sidecar.web.watch import StreamWatch

# Answers up to this size are sent once they are whole, so that a broken one can still become an error.
_WHOLE_BYTES = 1024 * 1024


@dataclass(slots=True)
class Copied:
    """Where a copied stream stands."""

    tail: bytes = b""
    """The last bytes that came."""
    pending: bytes = b""
    """The beginning of an event whose end has not come yet."""
    broken: bool = False
    """The engine broke off."""


class Proxy:
    """Carries admitted calls."""

    def __init__(
        self,
        engine: EngineLink,
        admission: Admission,
        recorder: Recorder,
        config: GateConfig,
        clock: Callable[[], int],
        *,
        closing: Callable[[web.BaseRequest], bool],
    ) -> None:
        """`closing` tells whether a request's connection should end with its answer."""
        self._closing = closing
        self._engine = engine
        self._admission = admission
        self._recorder = recorder
        self._stall_timeout_us = config.stall_timeout_us
        self._clock = clock

    async def forward(self, call: Call, permit: Permit, times: StreamTimes) -> web.StreamResponse | Refusal:
        """Send the call on and copy the answer back; a refusal when the engine gave none."""
        permit.forwarded(self._clock())
        told = call.terms.headers(self._clock() - call.arrived_us) | call.span.engine_headers()
        try:
            async with self._engine.request(
                "POST",
                PATHS[call.route],
                headers=headers.for_engine(call.request.headers, call.request_id, told),
                body=self._engine.body_for_engine(call.body.content, call.terms),
            ) as upstream:
                call.upstream = upstream
                call.body.drop()
                if call.cut:
                    upstream.close()
                if (refusal := self._own_answer(call, upstream.status)) is not None:
                    return refusal
                if upstream.content_type == "text/event-stream":
                    return await self._stream(call, upstream, permit, times)
                return await self._whole(call, upstream, permit, times)
        except EngineUnreachable as error:
            self._engine.poke()
            call.outcome = "failed"
            if error.refused:
                return Refusal(Reason.ENGINE_DEAD, "The engine is down and is being restarted; try again in a moment.")
            return Refusal(Reason.ENGINE_FAILED, "The engine ended before it answered; send the request again.")

    def _own_answer(self, call: Call, status: int) -> Refusal | None:
        """What the gate says in place of a status that concerns the two of them, not the client's request."""
        meaning = self._engine.meaning_of(status)
        if meaning is Reason.ENGINE_OVERLOADED:
            return self._admission.overflowed(call.terms, call.attempt, self._clock())
        if meaning is Reason.DEADLINE_MISSED:
            call.outcome = "expired"
            return MISSED
        if meaning is not None:
            self._engine.poke()
            return Refusal(meaning, "The engine is not ready; try again in a moment.")
        return None

    async def _stream(
        self, call: Call, upstream: aiohttp.ClientResponse, permit: Permit, times: StreamTimes
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, headers=headers.for_client(upstream.headers, call.answer_headers())
        )
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        if self._closing(call.request):
            response.force_close()
        watch = StreamWatch(call.request, response, self._clock, self._stall_timeout_us)
        copied = Copied()
        try:
            await response.prepare(call.request)
            await self._copy_events(upstream, watch, copied, permit, times)
            if not copied.broken and events.is_complete(copied.tail):
                call.outcome = "completed"
                permit.completed = upstream.status == web.HTTPOk.status_code
                self._completed(copied.tail, permit, times, streamed=True)
            elif call.cut:
                call.outcome = call.cut
            else:
                call.outcome = "expired" if events.is_expired(copied.tail) else "failed"
            if copied.broken or (call.outcome == "failed" and b'"error"' not in copied.tail):
                await watch.write(_error_event(call), self._clock())
            elif copied.pending:
                await watch.write(copied.pending, self._clock())
            await watch.finish()
        except (ConnectionError, asyncio.CancelledError):
            call.outcome = "stalled" if watch.stalled else "client_left"
            raise
        finally:
            watch.close()
        return response

    async def _copy_events(
        self,
        upstream: aiohttp.ClientResponse,
        watch: StreamWatch,
        copied: Copied,
        permit: Permit,
        times: StreamTimes,
    ) -> None:
        """Copy until the engine ends its stream, or breaks it."""
        # Of a choice that stands alone no event is taken apart.
        alone = len(permit.entry.choices) == 1
        while True:
            try:
                chunk = await upstream.content.readany()
            except (aiohttp.ClientError, ConnectionError):
                copied.broken = True
                return
            if not chunk:
                return
            now_us = self._clock()
            permit.touch(now_us)
            if alone:
                if events.has_text(chunk):
                    if permit.counts_tokens:
                        permit.tokens(0, events.count_with_text(chunk))
                    self._recorder.token(times, permit, now_us, 0)
            else:
                for choice, count in events.choices_with_text(chunk).items():
                    permit.tokens(choice, count)
                    self._recorder.token(times, permit, now_us, choice)
            copied.tail = (copied.tail + chunk)[-events.TAIL_BYTES :]
            if copied.pending or not chunk.endswith(b"\n\n"):
                # Only whole events go out, so that an error event can always follow.
                chunk, copied.pending = events.whole_events(copied.pending + chunk)
            if chunk:
                await watch.write(chunk, now_us)
                self._recorder.metrics.response_bytes.value += len(chunk)

    async def _whole(
        self, call: Call, upstream: aiohttp.ClientResponse, permit: Permit, times: StreamTimes
    ) -> web.StreamResponse | Refusal:
        content, size = [], 0
        try:
            while size <= _WHOLE_BYTES and (chunk := await upstream.content.readany()):
                content.append(chunk)
                size += len(chunk)
                permit.touch(self._clock())
        except (aiohttp.ClientError, ConnectionError):
            call.outcome = call.cut or "failed"
            if call.cut:
                return call.cut_refusal()
            return Refusal(
                Reason.ENGINE_FAILED, "The engine ended in the middle of its answer; send the request again."
            )
        head = b"".join(content)
        response = web.StreamResponse(
            status=upstream.status, headers=headers.for_client(upstream.headers, call.answer_headers())
        )
        if upstream.content.at_eof():
            response.content_length = len(head)
        elif upstream.content_length is not None:
            response.content_length = upstream.content_length
        if self._closing(call.request):
            response.force_close()
        watch = StreamWatch(call.request, response, self._clock, self._stall_timeout_us, pings=False)
        try:
            await response.prepare(call.request)
            await watch.write(head, self._clock())
            self._recorder.metrics.response_bytes.value += len(head)
            tail = head[-events.TAIL_BYTES :]
            while chunk := await self._next(call, upstream):
                now_us = self._clock()
                permit.touch(now_us)
                tail = (tail + chunk)[-events.TAIL_BYTES :]
                await watch.write(chunk, now_us)
                self._recorder.metrics.response_bytes.value += len(chunk)
            if upstream.status == web.HTTPOk.status_code:
                permit.completed = True
                self._completed(tail, permit, times, streamed=False)
                call.outcome = "completed"
            else:
                call.outcome = "refused" if upstream.status < web.HTTPInternalServerError.status_code else "failed"
            await watch.finish()
        except (ConnectionError, asyncio.CancelledError):
            call.outcome = call.outcome or ("stalled" if watch.stalled else "client_left")
            raise
        finally:
            watch.close()
        return response

    def _completed(self, tail: bytes, permit: Permit, times: StreamTimes, *, streamed: bool) -> None:
        """An answer came to its good end: what it says of its own length is measured, and learned from."""
        output_tokens = events.output_tokens(tail)
        self._recorder.completed(times, output_tokens, self._clock(), streamed=streamed)
        self._admission.room.told(permit, events.prompt_tokens(tail), output_tokens)

    @staticmethod
    async def _next(call: Call, upstream: aiohttp.ClientResponse) -> bytes:
        try:
            return await upstream.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            call.outcome = call.cut or "failed"
            # Part of the body is out: only a broken framing tells the client that the rest is missing.
            if call.request.transport is not None:
                call.request.transport.abort()
            raise ConnectionError("the engine ended in the middle of its answer") from error


def _error_event(call: Call) -> bytes:
    if call.cut == "expired":
        refusal = MISSED
    elif call.cut:
        refusal = Refusal(Reason.DRAINING, "This pod had to shut down before the answer was complete; send it again.")
    else:
        refusal = Refusal(
            Reason.ENGINE_FAILED, "The engine ended in the middle of this answer; send the request again."
        )
    return b"data: " + json.dumps(refusal.body()).encode() + b"\n\n"
