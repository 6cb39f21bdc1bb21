"""One admitted request's way to the engine and back: what it is sent with, what its status means, and whole answers.

Owns the exchange with the engine. No header goes out before the engine's status is known; what breaks later ends in
broken framing, or in the error event of a `stream`, never in a clean end. Must not decide about admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web

from sluice_sidecar import leases, refusals
from sluice_sidecar.admission import Admission
from sluice_sidecar.call import PATHS, Call
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.config import GateConfig
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal
from sluice_sidecar.refusals import MISSED
from sluice_sidecar.stream import Answer, EventStream
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_sidecar.telemetry.recorder import Recorder
from sluice_sidecar.web import events, headers
from sluice_sidecar.web.watch import StreamHead, StreamWatch

# Answers up to this size are sent once they are whole, so that a broken one can still become an error.
_WHOLE_BYTES = 1024 * 1024


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
            with leases.renewed(call, permit, self._clock):
                return await self._exchange(call, permit, times, told)
        except EngineUnreachable as error:
            self._engine.poke()
            call.outcome = "failed"
            if error.refused:
                return refusals.unavailable(Reason.ENGINE_DEAD)
            return Refusal(Reason.ENGINE_FAILED, "The engine ended before it answered; send the request again.")

    async def _exchange(
        self, call: Call, permit: Permit, times: StreamTimes, told: dict[str, str]
    ) -> web.StreamResponse | Refusal:
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
            answer = Answer(call, upstream, permit, times)
            if upstream.content_type == "text/event-stream":
                watch = self._watch(answer, {"cache-control": "no-cache", "x-accel-buffering": "no"})
                return await EventStream(answer, watch, self._recorder, self._completed, self._clock).carry()
            return await self._whole(answer)

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

    def _watch(self, answer: Answer, own: dict[str, str], *, pings: bool = True) -> StreamWatch:
        """Where the answer goes: a response with the engine's headers and the gate's own."""
        call, upstream = answer.call, answer.upstream
        told = headers.for_client(upstream.headers, call.answer_headers() | own)
        response = StreamHead(status=upstream.status, headers=told)
        if self._closing(call.request):
            response.force_close()
        return StreamWatch(call.request, response, self._clock, self._stall_timeout_us, pings=pings)

    async def _whole(self, answer: Answer) -> web.StreamResponse | Refusal:
        call, upstream = answer.call, answer.upstream
        content, size = [], 0
        try:
            while size <= _WHOLE_BYTES and (chunk := await upstream.content.readany()):
                content.append(chunk)
                size += len(chunk)
                answer.permit.touch(self._clock())
        except (aiohttp.ClientError, ConnectionError):
            call.outcome = call.cut or "failed"
            if call.cut:
                return call.cut_refusal()
            return Refusal(
                Reason.ENGINE_FAILED, "The engine ended in the middle of its answer; send the request again."
            )
        head = b"".join(content)
        watch = self._watch(answer, {}, pings=False)
        if upstream.content.at_eof():
            watch.response.content_length = len(head)
        elif upstream.content_length is not None:
            watch.response.content_length = upstream.content_length
        try:
            await watch.begin(head)
            self._recorder.metrics.response_bytes.value += len(head)
            tail = head[-events.TAIL_BYTES :]
            while chunk := await self._next(call, upstream):
                now_us = self._clock()
                answer.permit.touch(now_us)
                tail = (tail + chunk)[-events.TAIL_BYTES :]
                await watch.write(chunk, now_us)
                self._recorder.metrics.response_bytes.value += len(chunk)
            if upstream.status == web.HTTPOk.status_code:
                answer.permit.completed = True
                self._completed(answer, tail, streamed=False)
                call.outcome = "completed"
            else:
                call.outcome = "refused" if upstream.status < web.HTTPInternalServerError.status_code else "failed"
            await watch.finish()
        except (ConnectionError, asyncio.CancelledError):
            call.outcome = call.outcome or ("stalled" if watch.stalled else "client_left")
            raise
        finally:
            watch.close()
        return watch.response

    def _completed(self, answer: Answer, tail: bytes, *, streamed: bool = True) -> None:
        """An answer came to its good end: what it says of its own length is measured, and learned from."""
        output_tokens = events.output_tokens(tail)
        self._recorder.completed(answer.times, output_tokens, self._clock(), streamed=streamed)
        if streamed and output_tokens is None and events.has_stopped(tail):
            # The first choice stands for all: of several not every end is in the last bytes.
            answer.permit.tokens(0, 1)
        self._admission.room.told(answer.permit, events.prompt_tokens(tail), output_tokens)

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
