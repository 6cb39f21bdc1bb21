"""What callers are told after a step. Most of it is one token each for requests that go on, and stays in arrays.

`Emissions` reads as a sequence of `Emission`s, made one by one as somebody iterates; the engine's own thread counts
tokens and gaps in bulk and makes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sluice_engine.core.plan import Ints, Logprob
from sluice_engine.core.request import Outcome, Request

HELD_TOKEN = b": token "
"""Begins a line that stands for a token whose text has to wait: to clients a comment, to the gate a token."""


@dataclass(frozen=True, slots=True)
class Emission:
    """What one request's caller is told: a token, an end, or both."""

    request: Request
    token_id: int | None = None
    """None when the request ended without a new token."""
    logprob: Logprob | None = None
    outcome: Outcome | None = None
    """Set with the last emission of a request."""
    gap_us: int | None = None
    """Since its last token; None for a first one."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedTokens:
    """One token each for requests that decoded in one step."""

    requests: Sequence[Request]
    token_ids: Sequence[int]
    gaps_us: Ints
    special: Mapping[int, Emission] = field(default_factory=dict)
    """By index, those that are more than a token: they ended, failed, or have a log probability."""

    def __len__(self) -> int:
        """How many."""
        return len(self.requests)

    def __iter__(self) -> Iterator[Emission]:
        """One by one."""
        special = self.special
        for index, (request, token_id, gap_us) in enumerate(
            zip(self.requests, self.token_ids, self.gaps_us.tolist(), strict=True)
        ):
            yield special.get(index) or Emission(request, token_id, gap_us=gap_us)


class Emissions:
    """All that is to be told, in order: parts in bulk, and single ones between them."""

    def __init__(self, *parts: DecodedTokens | Sequence[Emission]) -> None:
        self.parts: list[DecodedTokens | Sequence[Emission]] = [part for part in parts if len(part)]

    def __iter__(self) -> Iterator[Emission]:
        """One by one."""
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        """How many."""
        return sum(map(len, self.parts))

    def extend(self, later: Emissions) -> None:
        """Add what is to be told after these."""
        self.parts += later.parts

    def special(self) -> Iterator[Emission]:
        """Those that are not merely one more token."""
        for part in self.parts:
            yield from part.special.values() if isinstance(part, DecodedTokens) else part
