"""What limits the next token of a request beyond its sampling parameters: a grammar, as far as scheduling sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ConstraintBroken(Exception):
    """The grammar cannot go on for this request, which fails; the text says why, for a person."""


class Constraint(Protocol):
    """Which tokens may follow those that a request has had.

    It follows what is sampled, in the thread that samples: a step's tokens are known there before the next is
    sampled, however many steps are planned ahead. So no step has to be settled first, and no mask is that of another
    beginning; a victim of a preemption is never in flight, so what was sampled of it is settled.
    """

    def mask(self, position: int, output: Sequence[int]) -> bytes:
        """One bit for each token, the lowest of a byte first: whether it may be the output token at `position`.

        `output` are the output tokens that are settled, at most so many; what lies between was told by `took`.

        Raises:
            ConstraintBroken: nothing may come, or it grew too complex to tell.
        """
        ...

    def took(self, token_id: int) -> None:
        """This token was sampled.

        Raises:
            ConstraintBroken: it may not come here.
        """
        ...
