"""What tenants with no more than their share ask for, by the second: so much room is kept for them from the others.

Sizes and moments of requests are a matter of chance, so the fullest while of the last seconds counts, not the mean, and
a pause that chance explains is not the end of asking. Sums and moments only: no request and no prompt is kept. Pure.
Must not know whose the requests are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from sluice_sidecar.capacity.cost import Cost

SECOND_US = 1_000_000
# Of ten seconds none is full once in a while, and then room was kept for too little: beside as much room on average,
# chat of four a second wanted more than was kept ten times as often.
SECONDS = 30
# Calls that come at random pause for more than eight times their mean distance once in three thousand times.
SILENT_MEANS = 8
# The mean is over so many of the last calls.
MOMENTS = 32
# Seldom asked for, less room is kept; so long at most, since a share that nobody uses is there for others.
LEAST_SILENCE_US, MOST_SILENCE_US = 1_000_000, 5_000_000


@dataclass(slots=True)
class Wanted:
    """What was asked for in a while."""

    requests: int = 0
    """Choices of calls: a slot each."""
    tokens: int = 0
    """That they are expected to hold at last."""


class Wishes:
    """The last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Wanted]] = deque(maxlen=SECONDS)
        self._moments: deque[int] = deque(maxlen=MOMENTS)

    def add(self, cost: Cost, now_us: int) -> None:
        """A call was asked for."""
        self._moments.append(now_us)
        second = now_us // SECOND_US
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Wanted()))
        wanted = self._seconds[-1][1]
        wanted.requests += len(cost.choices)
        wanted.tokens += sum(choice.prompt_tokens + choice.output_tokens for choice in cost.choices)

    def silence_us(self) -> int:
        """After so long without a call nobody asks any more; a shorter pause is a matter of chance."""
        if len(self._moments) < 2:
            return LEAST_SILENCE_US
        mean_us = (self._moments[-1] - self._moments[0]) // (len(self._moments) - 1)
        return min(MOST_SILENCE_US, max(LEAST_SILENCE_US, SILENT_MEANS * mean_us))

    def most(self, now_us: int) -> Wanted:
        """The most that was asked for within two seconds on end: what is inside falls free at its own pace."""
        since = now_us // SECOND_US - SECONDS
        requests = tokens = 0
        for (earlier, before), (second, wanted) in pairwise(((since, _NOTHING), *self._seconds)):
            if second > since:
                both = since < earlier == second - 1
                requests = max(requests, wanted.requests + both * before.requests)
                tokens = max(tokens, wanted.tokens + both * before.tokens)
        return Wanted(requests, tokens)


_NOTHING = Wanted()
