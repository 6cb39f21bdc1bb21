"""Running requests as rows of arrays, one row a slot: what a step reads and writes in bulk.

A request holds its slot while it runs; nothing is moved together when another leaves. A decoding row goes on by itself,
one token a step, up to `until`: only then (it needs a block, or its last token is in flight) does the scheduler look at
it. Who decodes is one immutable `DecodeBatch`, made anew only when somebody starts or ends. It knows no budgets.
"""

from __future__ import annotations

import numpy as np

from sluice_engine.core.plan import DecodeBatch, Ints, Objects
from sluice_engine.core.request import Request


class Rows:
    """The persistent batch. The planned progress of a request is here; what is settled is the request's own."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.requests: Objects = np.full(num_slots, None, dtype=object)
        self.start: Ints = np.zeros(num_slots, dtype=np.int64)
        """Position of the next token to compute."""
        self.until: Ints = np.zeros(num_slots, dtype=np.int64)
        """Position up to which a decode needs nobody: the end of its blocks, or of its length."""
        self.limit: Ints = np.zeros(num_slots, dtype=np.int64)
        """Most tokens whose KV the row can ever hold: a decode that reaches it samples the last token."""
        self.tenure: Ints = np.zeros(num_slots, dtype=np.int64)
        """Number of the stay that the slot is at: one for each incarnation of each request."""
        self.last_token_us: Ints = np.zeros(num_slots, dtype=np.int64)
        self._ids: Objects = np.full(num_slots, None, dtype=object)
        self._incarnation: Ints = np.zeros(num_slots, dtype=np.int64)
        self._plain = np.zeros(num_slots, dtype=bool)
        self._penalised = np.zeros(num_slots, dtype=bool)
        self._decoding = np.zeros(num_slots, dtype=bool)
        # A stack, lowest slot on top.
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_tenures = 0
        self._decodes: DecodeBatch | None = None

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Slots that are held."""
        return self.num_slots - len(self._free)

    def running(self) -> list[Request]:
        """Who runs, by first arrival. It costs a walk over all slots: not for every step."""
        return sorted((request for request in self.requests if request is not None), key=_arrival)

    def enter(self, request: Request) -> None:
        """Give a request a slot; every field of the row is written."""
        slot = self._free.pop()
        self._num_tenures += 1
        request.slot = slot
        self.requests[slot] = request
        self._ids[slot] = request.id
        self._incarnation[slot] = request.incarnation
        self.tenure[slot] = self._num_tenures
        self.start[slot] = request.num_computed
        self.limit[slot] = request.peak_tokens
        self.last_token_us[slot] = request.last_token_us
        self._plain[slot] = request.sampling.plain
        self._penalised[slot] = request.sampling.penalised
        self._decoding[slot] = False

    def leave(self, request: Request) -> None:
        """Take the slot back. What is in flight for it is stale from now on."""
        slot = request.slot
        assert self.requests[slot] is request, f"request {request.id} does not hold slot {slot}"
        request.slot = -1
        request.last_token_us = int(self.last_token_us[slot])
        self.requests[slot] = None
        self._ids[slot] = None
        self.tenure[slot] = 0
        self._set_decoding(slot, holds=False)
        self._free.append(slot)

    def start_decoding(self, slot: int, until: int) -> None:
        """From the next step on the row decodes by itself, up to the token before `until`."""
        self.until[slot] = until
        self._set_decoding(slot, holds=True)

    def stop_decoding(self, slot: int) -> None:
        """The row's last token is in flight: it takes part in no further step."""
        self._set_decoding(slot, holds=False)

    def decodes(self) -> DecodeBatch:
        """Who decodes; the same object until that changes."""
        if self._decodes is None:
            self._decodes = self.batch_of(np.flatnonzero(self._decoding))
        return self._decodes

    def batch_of(self, slots: Ints) -> DecodeBatch:
        """These rows as a batch."""
        return DecodeBatch(
            slots=slots,
            tenures=self.tenure[slots],
            incarnations=self._incarnation[slots],
            requests=self.requests[slots],
            ids=self._ids[slots],
            plain=bool(self._plain[slots].all()),
            penalised=bool(self._penalised[slots].any()),
        )

    def _set_decoding(self, slot: int, *, holds: bool) -> None:
        if self._decoding[slot] != holds:
            self._decoding[slot] = holds
            self._decodes = None


def _arrival(request: Request) -> int:
    return request.arrival_us
