"""One stream of events from engine to client: pieces are passed on as they are read, timed, counted, and ended truly.

Owns what a stream's end means: `[DONE]` only where the engine said it, an error event where it broke off. Must not know
admission, nor how bytes are read and written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from sluice_sidecar.call import Call, Outcome
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.refusals import MISSED
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_sidecar.telemetry.recorder import Recorder
from sluice_sidecar.web import events
from sluice_sidecar.web.relay import Relay
from sluice_sidecar.web.watch import StreamWatch

# Of what came last more is kept than its end, so that not every token copies it.
_MOST_LAST_BYTES = 2 * events.TAIL_BYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine answers to an admitted call."""

    call: Call
    upstream: aiohttp.ClientResponse
    permit: Permit
    times: StreamTimes


class EventStream:
    """One answer of events on its way."""

    def __init__(
        self,
        answer: Answer,
        watch: StreamWatch,
        recorder: Recorder,
        completed: Callable[[Answer, bytes], None],
        clock: Callable[[], int],
    ) -> None:
        """`completed` is told of a good end, with the answer's last bytes."""
        self._call, self._upstream = answer.call, answer.upstream
        self._answer = answer
        self._watch = watch
        self._recorder = recorder
        self._completed = completed
        self._clock = clock
        self._entry = answer.permit.entry
        self._times = answer.times
        # Of a choice that stands alone no event is taken apart.
        self._alone = len(self._entry.choices) == 1
        self._last = bytearray()
        """What came last, and more than is asked for."""
        self._pending = b""
        """The beginning of an event whose end has not come yet."""
        self._held = b""
        """Whole events that came with the end of the body."""

    async def carry(self) -> web.StreamResponse:
        """Pass it on, from its head to its end; the call's outcome is told before the last byte goes out."""
        call, watch = self._call, self._watch
        try:
            # An engine sends the beginning of its answer with the head.
            first = b"" if self._upstream.content.exception() else self._upstream.content.read_nowait()
            await watch.begin(self._seen(first, self._clock()) if first else b"")
            whole = await Relay(self._upstream, self._take, watch.caught_up, len(first)).run()
            call.outcome = self._outcome(whole=whole)
            if call.outcome == "completed":
                self._answer.permit.completed = self._upstream.status == web.HTTPOk.status_code
                self._completed(self._answer, self._tail)
            # An engine that frames nothing ends what it breaks off as it ends what is whole.
            if not whole or (call.outcome != "completed" and b'"error"' not in self._tail):
                await watch.finish(self._held + self._error_event())
            else:
                await watch.finish(self._held + self._pending)
        except (ConnectionError, asyncio.CancelledError):
            call.outcome = "stalled" if watch.stalled else "client_left"
            raise
        finally:
            watch.close()
        return watch.response

    def _take(self, piece: bytes) -> bool:
        """Pass on a piece; whether the client is behind."""
        now_us = self._clock()
        if not (events_in_it := self._seen(piece, now_us)):
            return False
        if self._upstream.content.at_eof():
            # It goes out with the end of the body.
            self._held += events_in_it
            return False
        return self._watch.send(events_in_it, now_us)

    def _seen(self, piece: bytes, now_us: int) -> bytes:
        """Count what a piece brought; the whole events to pass on."""
        self._entry.touched_us = now_us
        if not self._alone:
            self._count_choices(piece, now_us)
        elif count := events.count_with_text(piece):
            self._answer.permit.tokens(0, count)
            self._recorder.token(self._times, self._answer.permit, now_us, 0)
        self._last += piece
        if len(self._last) > _MOST_LAST_BYTES:
            del self._last[: -events.TAIL_BYTES]
        if self._pending or not piece.endswith(b"\n\n"):
            # Only whole events go out, so that an error event can always follow.
            piece, self._pending = events.whole_events(self._pending + piece)
        self._recorder.metrics.response_bytes.value += len(piece)
        return piece

    @property
    def _tail(self) -> bytes:
        return bytes(self._last[-events.TAIL_BYTES :])

    def _count_choices(self, piece: bytes, now_us: int) -> None:
        for choice, count in events.choices_with_text(piece).items():
            self._answer.permit.tokens(choice, count)
            self._recorder.token(self._times, self._answer.permit, now_us, choice)

    def _outcome(self, *, whole: bool) -> Outcome:
        if whole and events.is_complete(self._tail):
            return "completed"
        if self._call.cut:
            return self._call.cut
        if events.is_expired(self._tail):
            return "expired"
        return "refused" if events.is_refused(self._tail) else "failed"

    def _error_event(self) -> bytes:
        if self._call.cut == "expired":
            refusal = MISSED
        elif self._call.cut:
            refusal = Refusal(
                Reason.DRAINING, "This pod had to shut down before the answer was complete; send it again."
            )
        else:
            refusal = Refusal(
                Reason.ENGINE_FAILED, "The engine ended in the middle of this answer; send the request again."
            )
        return b"data: " + json.dumps(refusal.body()).encode() + b"\n\n"
