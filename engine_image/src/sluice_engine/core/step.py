"""A plan while it is made: what is scheduled so far, and what is left of each of the step's budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sluice_engine.core.budgets import Budgets
from sluice_engine.core.needs import DECODE_NEEDS, LASTING, chunk_needs, draft_needs
from sluice_engine.core.plan import NO_POSITIONS, NOBODY, DecodeBatch, HeldBack, IdleReason, Ints, Preemption
from sluice_engine.core.request import Request
from sluice_engine.core.step_limits import StepLimits


class Step:
    """The making of one plan. What is taken of the step is taken here alone, so that undoing is giving back."""

    def __init__(self, number: int, now_us: int, limits: StepLimits, more: Mapping[str, int]) -> None:
        """`more`: budgets beyond tokens, by name; those that last longer than a step are not counted here."""
        self.number = number
        self.now_us = now_us
        self.limits = limits
        extra = {name: limit for name, limit in more.items() if name not in LASTING}
        self.budgets = Budgets({"tokens": limits.token_budget, "prefill_tokens": 0, **extra})
        self.decodes: DecodeBatch = NOBODY
        self.starts: Ints = NO_POSITIONS
        self.context = 0
        """KV tokens that the decodes attend to, their own included."""
        self.chunks: dict[Request, tuple[int, int]] = {}
        """Start and number of tokens."""
        self.drafts: dict[Request, tuple[int, ...]] = {}
        """Guesses that are the last of a chunk's tokens."""
        self.prefill = 0
        """Their tokens."""
        self.prior_pairs = 0
        """Query–key pairs of the prefill with tokens computed before this step."""
        self.preempted: list[Preemption] = []
        self.failed: list[Request] = []
        """Requests that a fault of ours ended while the plan was made."""
        self.held_back: list[HeldBack] = []
        self.gate: IdleReason | None = None
        """Why those that were not looked at stay out."""

    def takes_prefill(self) -> bool:
        """Whether any token of a prompt still fits."""
        return min(self.budgets.left("tokens"), self.budgets.left("prefill_tokens")) > 0

    def set_decodes(self, batch: DecodeBatch, starts: Ints) -> None:
        """These requests compute one token each; what a prompt may take beside them follows from it."""
        self.decodes, self.starts = batch, starts
        self.context += int(starts.sum()) + len(batch)
        self.budgets.take_for_each(len(batch), DECODE_NEEDS)
        self.budgets.limit("prefill_tokens", self.limits.prefill_budget(len(batch), self.context))

    def add_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        """A request computes so many more tokens of its prompt: `start` is where its share of this step begins."""
        before = self.chunks.get(request, (start, 0))[1]
        self.budgets.take(request, chunk_needs(request, start + before, num_tokens))
        self.chunks[request] = (start, before + num_tokens)
        self.prefill += num_tokens
        self.prior_pairs += start * num_tokens

    def take_back(self, request: Request) -> None:
        """Undo a request: all that it had taken of this step goes back."""
        self.budgets.take_back(request)
        start, num_tokens = self.chunks.pop(request, (0, 0))
        self.drafts.pop(request, None)
        self.prefill -= num_tokens
        self.prior_pairs -= start * num_tokens
        self._keep(np.flatnonzero(self.decodes.requests != request))

    def turn_into_drafts(self, drafts: Mapping[Request, tuple[int, tuple[int, ...]]]) -> None:
        """Decodes compute guesses after their newest token: by request, where that token is, and the guesses."""
        self._keep(np.array([i for i, r in enumerate(self.decodes.requests) if r not in drafts], dtype=np.int64))
        for request, (start, guesses) in drafts.items():
            num_tokens = 1 + len(guesses)
            self.budgets.take(request, draft_needs(len(guesses)))
            self.chunks[request], self.drafts[request] = (start, num_tokens), guesses
            self.prefill += num_tokens
            self.prior_pairs += start * num_tokens

    def _keep(self, indices: Ints) -> None:
        """These decodes alone."""
        gone = len(self.decodes) - len(indices)
        if gone:
            before = int(self.starts.sum())
            self.decodes, self.starts = self.decodes.part(indices), self.starts[indices]
            self.context -= before - int(self.starts.sum()) + gone
            self.budgets.take_back_for_each(gone, DECODE_NEEDS)

    def waiting_reasons(self, num_waiting: int) -> tuple[tuple[IdleReason, int], ...]:
        """Waiting requests by the gate that holds them; those not looked at are held by what stopped the looking."""
        counts: dict[IdleReason, int] = {}
        for held in self.held_back:
            counts[held.reason] = counts.get(held.reason, 0) + 1
        rest = num_waiting - len(self.held_back)
        if rest and self.gate is not None:
            counts[self.gate] = counts.get(self.gate, 0) + rest
        return tuple(counts.items())


Contain = Callable[[Request, Exception, Step], None]
"""What ends a request for which planning came upon an impossible state; it may raise."""
