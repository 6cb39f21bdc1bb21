"""A count over the last while: what happened longer ago is forgotten.

Pure: the clock comes in with each call, and never goes back by more than its owner clears for.
"""

from __future__ import annotations

from collections import deque


class Recent:
    """How many there were within the horizon."""

    def __init__(self, horizon_us: int) -> None:
        self._horizon_us = horizon_us
        self._counts: deque[tuple[int, int]] = deque()
        """(when, how many), in the order in which they came."""
        self._total = 0

    def add(self, count: int, now_us: int) -> None:
        """So many more, now."""
        self._counts.append((now_us, count))
        self._total += count

    def total(self, now_us: int) -> int:
        """Of the last while; one that is as old as the horizon still counts."""
        while self._counts and now_us - self._counts[0][0] > self._horizon_us:
            self._total -= self._counts.popleft()[1]
        return self._total

    def clear(self) -> None:
        """As if nothing had happened."""
        self._counts.clear()
        self._total = 0
