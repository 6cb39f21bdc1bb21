"""A plan while it is made: what is scheduled so far, and what is left of each of the step's budgets."""

from __future__ import annotations

from collections.abc import Mapping

from sluice_engine.core.budgets import Budgets, Needs
from sluice_engine.core.plan import NO_POSITIONS, NOBODY, DecodeBatch, HeldBack, IdleReason, Ints, Preemption
from sluice_engine.core.request import Request

DECODE_NEEDS = Needs({"tokens": 1})


def chunk_needs(num_tokens: int) -> Needs:
    """What a chunk of a prompt takes of a step's budgets."""
    return Needs({"tokens": num_tokens, "prefill_tokens": num_tokens})


class Step:
    """The making of one plan. Nothing outside it changes before the plan is sealed, so undoing is giving back."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.budgets = Budgets({"prefill_tokens": 0, **limits})
        self.decodes: DecodeBatch = NOBODY
        self.starts: Ints = NO_POSITIONS
        self.context = 0
        """KV tokens that the decodes attend to, their own included."""
        self.chunks: dict[Request, tuple[int, int]] = {}
        """Start and number of tokens, in order of first arrival within each part of the plan."""
        self.preempted: list[Preemption] = []
        self.held_back: list[HeldBack] = []
        self.gate: IdleReason | None = None
        """Why those that were not looked at stay out."""

    @property
    def prefill(self) -> int:
        """Prefill tokens so far."""
        return sum(num_tokens for _, num_tokens in self.chunks.values())

    @property
    def prior_pairs(self) -> int:
        """Query–key pairs of the prefill with tokens computed before this step."""
        return sum(start * num_tokens for start, num_tokens in self.chunks.values())

    def set_decodes(self, batch: DecodeBatch, starts: Ints) -> None:
        """These requests compute one token each."""
        self.decodes, self.starts = batch, starts
        self.context += int(starts.sum()) + len(batch)
        self.budgets.take_for_each(len(batch), DECODE_NEEDS)

    def add_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        """A request computes so many more tokens of its prompt: `start` is where its share of this step begins."""
        before = self.chunks.get(request, (start, 0))[1]
        self.chunks[request] = (start, before + num_tokens)
        self.budgets.take(request, chunk_needs(num_tokens))

    def take_back(self, request: Request) -> None:
        """Undo a request: all that it had taken of this step goes back."""
        self.budgets.take_back(request)
        self.chunks.pop(request, None)
        keep = (self.decodes.requests != request).nonzero()[0]
        if len(keep) < len(self.decodes):
            gone = int(self.starts.sum())
            self.decodes, self.starts = self.decodes.part(keep), self.starts[keep]
            self.context -= gone - int(self.starts.sum()) + 1
            self.budgets.take_one_back(DECODE_NEEDS)
