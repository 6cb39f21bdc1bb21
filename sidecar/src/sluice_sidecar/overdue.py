"""Timers of a running call's own bounds: who misses one is cut, whether its engine knows deadlines or not.

Sluice's own engine ends such a request by itself with its next step; others would go on to the last token. A first
token shows in a stream only: of a whole answer the engine alone can tell. Must not know how a call is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice_sidecar.call import Call
from sluice_sidecar.telemetry.measure import StreamTimes


@contextmanager
def watched(call: Call, times: StreamTimes, clock: Callable[[], int]) -> Iterator[None]:
    """While inside, a call is cut once its first token, or its last, is of no use any more."""
    loop, terms = asyncio.get_running_loop(), call.terms
    waited_us = clock() - call.arrived_us
    timers = []
    if terms.finish_us is not None:
        timers.append(loop.call_later(max(0, terms.finish_us - waited_us) / 1e6, call.end_early, "expired"))
    if terms.first_token_us is not None and call.streamed:

        def first_is_due() -> None:
            if times.first_us is None:
                call.end_early("expired")

        timers.append(loop.call_later(max(0, terms.first_token_us - waited_us) / 1e6, first_is_due))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
