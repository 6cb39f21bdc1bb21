"""What tenants with no more than their share ask for, by the second: so much room is kept for them from the others.

Sizes and moments of requests are a matter of chance, so the fullest of the last seconds counts, not the mean. Sums
only: no request and no prompt is kept. Pure. Must not know whose the requests are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sluice_sidecar.capacity.cost import Cost

SECOND_US = 1_000_000
SECONDS = 10


@dataclass(slots=True)
class Wanted:
    """What was asked for in a second."""

    requests: int = 0
    """Choices of calls: a slot each."""
    tokens: int = 0
    """That they are expected to hold at last."""


class Wishes:
    """The last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Wanted]] = deque(maxlen=SECONDS)

    def add(self, cost: Cost, now_us: int) -> None:
        """A call was asked for."""
        second = now_us // SECOND_US
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Wanted()))
        wanted = self._seconds[-1][1]
        wanted.requests += len(cost.choices)
        wanted.tokens += sum(choice.prompt_tokens + choice.output_tokens for choice in cost.choices)

    def most(self, now_us: int) -> Wanted:
        """The most that was asked for within one of the last seconds."""
        since = now_us // SECOND_US - SECONDS
        recent = [wanted for second, wanted in self._seconds if second > since]
        return Wanted(
            max((wanted.requests for wanted in recent), default=0), max((wanted.tokens for wanted in recent), default=0)
        )
