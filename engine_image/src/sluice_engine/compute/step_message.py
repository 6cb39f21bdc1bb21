"""What rank 0 tells the others of a step: everything its inputs are built from, in one message, and nothing else.

Prompts' tokens go as far as the step computes them; a decode is a slot, a position and the token it begins with, which
only rank 0 has sampled. From the same messages every rank builds the same inputs, so ranks cannot come apart. Pickled
over a pipe between a process and its own children: some hundred bytes, and 24 more a decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from sluice_engine.core.host_pool import Copies
from sluice_engine.core.plan import Ints, StepPlan, TableChange


class Share(Protocol):
    """One request's tokens [start, start + num_tokens) of a step: as planned, or as another rank is told."""

    @property
    def slot(self) -> int:
        """Whose; each has one share at most."""
        ...

    @property
    def start(self) -> int:
        """Position of the first."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves."""
        ...

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled after it."""
        ...

    def sampling(self) -> Iterator[Share]:
        """One share for each of those, which ends with the token that it follows."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request at `start` and after, the last `num_drafts` of which are guesses."""

    slot: int
    start: int
    tokens: list[int]
    samples: bool
    num_drafts: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled after it."""
        return 1 + self.num_drafts if self.samples else 0

    def sampling(self) -> Iterator[Piece]:
        """One share for each token that is sampled, which ends with the token that it follows."""
        known = len(self.tokens) - self.num_drafts
        for count in range(self.num_sampled):
            yield replace(self, tokens=self.tokens[: known + count], num_drafts=count)


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One step, or one that is only timed."""

    table_changes: tuple[TableChange, ...]
    slots: Ints
    """Of the decodes, and with `starts` and `tokens` what each computes."""
    starts: Ints
    tokens: Ints
    pieces: tuple[Piece, ...]
    swap_out: Copies = ()
    swap_in: Copies = ()
    synthetic: bool = False
    """Whether its tables are those of steps that nobody asked for."""
    scratch: bool = False
    """Whether it writes to the scratch block alone."""

    @classmethod
    def of(cls, plan: StepPlan, last_tokens: Ints, *, synthetic: bool = False, scratch: bool = False) -> StepMessage:
        """A plan, with the tokens that its decodes begin with."""
        pieces = tuple(
            Piece(chunk.slot, chunk.start, chunk.tokens, chunk.samples, len(chunk.drafts)) for chunk in plan.chunks
        )
        return cls(
            tuple(plan.table_changes),
            plan.decodes.slots,
            plan.decode_starts,
            last_tokens,
            pieces,
            plan.swap_out,
            plan.swap_in,
            synthetic,
            scratch,
        )
