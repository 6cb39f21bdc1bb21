"""The lease of a running call, renewed for as long as both ends of its answer are there.

A lease ends what lost its owner, and goes by movement. An engine that does not list its requests shows none of a whole
answer before its end, nor of a stream before its first token, however long that takes. Must not know what is carried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice_sidecar.call import Call
from sluice_sidecar.capacity import ledger
from sluice_sidecar.capacity.ledger import Permit

# Renewed so often in one lease that a loop that lags ends none.
_RENEWALS = 4


@contextmanager
def renewed(call: Call, permit: Permit, clock: Callable[[], int]) -> Iterator[None]:
    """While inside, the lease of a call lives on, unless it was cut or its client has left.

    Inside is where an answer is waited for: a connection to the engine that breaks ends the wait at once. What the
    engine lists needs no such word: its progress renews the lease, and want of progress ends it.
    """
    if not permit.counts_tokens:
        yield
        return
    loop, every_s = asyncio.get_running_loop(), ledger.LEASE_US / _RENEWALS / 1e6
    timer: asyncio.TimerHandle

    def renew() -> None:
        nonlocal timer
        transport = call.request.transport
        if call.cut or transport is None or transport.is_closing():
            return
        permit.touch(clock())
        timer = loop.call_later(every_s, renew)

    timer = loop.call_later(every_s, renew)
    try:
        yield
    finally:
        timer.cancel()
