"""How a step's prefill is divided among the prompts that want some of it.

Oldest first, but no prompt takes a step from all others: it leaves them half of what is left, where they want that
much. What was kept for them and they could not use returns to those that still want it. A prompt's share ends where a
budget does: the step's tokens, its ceiling, the user's cap for one request, an item of media that does not fit.
"""

from __future__ import annotations

from sluice_engine.core.needs import fitting_tokens
from sluice_engine.core.order.waiting import Waiting
from sluice_engine.core.request import Request
from sluice_engine.core.running import Running
from sluice_engine.core.step import Step


class Shares:
    """The division of prefill."""

    def __init__(self, running: Running, waiting: Waiting) -> None:
        self._running = running
        self._waiting = waiting

    def schedule(self, step: Step) -> None:
        """Chunks of the requests that run."""
        prefilling = self._running.prefilling
        wanted = self._waiting.waiting_tokens + sum(map(self._uncomputed, prefilling))
        for request in prefilling:
            wanted -= self._uncomputed(request)
            self._add(request, step, wanted_behind=wanted)

    def share_out_the_rest(self, step: Step) -> None:
        """What was kept for others and not used goes to those that still want it, oldest first."""
        for request in self._running.prefilling:
            if not step.takes_prefill():
                return
            self._add(request, step, wanted_behind=0)

    def of(self, request: Request, start: int, step: Step, *, wanted_behind: int) -> int:
        """Tokens of a request that may join the step, where its share begins at `start`; at most 0 for none."""
        left = step.budgets.left("prefill_tokens")
        left -= min(left // 2, max(0, wanted_behind))
        has = step.chunks.get(request, (start, 0))[1]
        share = min(request.num_tokens - start - has, step.budgets.left("tokens"), left)
        cap = step.limits.max_prefill_tokens_per_request
        if cap is not None:
            share = min(share, cap - has)
        if share > 0 and (start or step.chunks):
            # The budget was made for the start of a prompt: a chunk that lies deeper costs more.
            decodes, prefill, pairs = len(step.decodes), step.prefill, step.prior_pairs
            share = min(share, step.limits.chunk_share(decodes, step.context, start, prefill, pairs))
        return fitting_tokens(request, start + has, share, step.budgets) if request.media else share

    def _add(self, request: Request, step: Step, *, wanted_behind: int) -> None:
        start = int(self._running.rows.start[request.slot])
        num_tokens = self.of(request, start, step, wanted_behind=wanted_behind)
        if num_tokens > 0:
            step.add_chunk(request, start, num_tokens)

    def _uncomputed(self, request: Request) -> int:
        return request.num_tokens - int(self._running.rows.start[request.slot])
