"""Which running requests compute one token in a step: all that decode, in bulk.

A decode goes on by itself until it is at the end of its blocks, or its last token is in flight: those alone are looked
at, oldest first, since a block may cost another its place.
"""

from __future__ import annotations

import numpy as np

from sluice_engine.core.ladder import Ladder
from sluice_engine.core.plan import DecodeBatch
from sluice_engine.core.request import Request
from sluice_engine.core.rows import Rows
from sluice_engine.core.step import Contain, Step
from sluice_engine.core.window import DrainFirst


class Decodes:
    """The first part of every plan: decode is reserved."""

    def __init__(self, rows: Rows, ladder: Ladder, contain: Contain) -> None:
        self._rows = rows
        self._ladder = ladder
        self._contain = contain

    def schedule(self, step: Step) -> None:
        """All decodes, once those that cannot go on by themselves have been seen to.

        Raises:
            DrainFirst: somebody would have to be preempted, and a victim must not be in flight.
        """
        rows = self._rows
        stalled: set[int] = set()
        while True:
            batch = self._within(step.budgets.left("tokens"), stalled)
            starts = rows.start[batch.slots]
            due = np.flatnonzero(starts >= rows.until[batch.slots])
            if not len(due):
                step.set_decodes(batch, starts)
                return
            for request in sorted(batch.requests[due], key=_arrival):
                try:
                    # A victim of an older one has no slot any more.
                    if request.slot >= 0 and not self._carry_on(request, step) and request.slot >= 0:
                        stalled.add(request.slot)
                except DrainFirst:
                    raise
                except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request
                    self._contain(request, error, step)

    def _within(self, budget: int, stalled: set[int]) -> DecodeBatch:
        """Who decodes, but for those that cannot get a block; the oldest when the budget does not suffice."""
        batch = self._rows.decodes()
        if stalled:
            batch = batch.part(np.flatnonzero(~np.isin(batch.slots, list(stalled))))
        if len(batch) > budget:
            arrivals = np.array([request.arrival_us for request in batch.requests])
            batch = batch.part(np.sort(np.argsort(arrivals, kind="stable")[:budget]))
        return batch

    def _carry_on(self, request: Request, step: Step) -> bool:
        """See to a decode that is at the end of its blocks or of its length; False when it cannot run in this step."""
        start = int(self._rows.start[request.slot])
        if start < request.peak_tokens:
            return self._ladder.make_room(request, start + 1, step)
        self._rows.stop_decoding(request.slot)  # its last token is in flight: one more step would be of no use
        return True


def _arrival(request: Request) -> int:
    return request.arrival_us
