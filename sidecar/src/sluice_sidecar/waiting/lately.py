"""What each tenant was given of late, what is older fading: who has much at this moment may have had little before.

Owns one sum for each tenant, and which of them is the largest for its tenant's weight. Sums are kept in units that grow
with time, so nothing is touched for fading. Pure: the clock comes in with each call. Must not know what is inside now.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import exp2

# Some stays long: a handful of requests that came together is not a habit.
HALF_LIFE_US = 20_000_000
# Beyond, the sums begin anew in small units: a float has room for far more.
_MOST_HALF_LIVES = 64


class Lately:
    """The fading sums."""

    def __init__(self, weight: Callable[[str], int]) -> None:
        """`weight(tenant)`: what its share is in proportion to."""
        self._weight = weight
        self._sums: dict[str, float] = {}
        self._all = 0.0
        self._origin_us: int | None = None
        self._ranks: list[tuple[float, str]] = []
        """A heap of (−sum over weight, tenant); some entries are left from before."""

    def add(self, tenant: str, engine_us: int, at_us: int) -> None:
        """It was given so much then; less than nothing corrects what was added for that moment before."""
        if self._origin_us is None:
            self._origin_us = at_us
        half_lives = (at_us - self._origin_us) / HALF_LIFE_US
        if half_lives > _MOST_HALF_LIVES:
            self._sums = {name: found * exp2(-half_lives) for name, found in self._sums.items()}
            self._all *= exp2(-half_lives)
            self._origin_us, half_lives = at_us, 0.0
            self.rank()
        units = engine_us * exp2(half_lives)
        self._sums[tenant] = self._sums.get(tenant, 0.0) + units
        self._all += units
        heappush(self._ranks, (-self._for_weight(tenant), tenant))
        if len(self._ranks) > 2 * len(self._sums) + 64:
            self.rank()

    def forget(self, tenant: str) -> None:
        """It is gone; what it had goes on counting among all that was given."""
        self._sums.pop(tenant, None)

    def is_most(self, tenant: str, part: float) -> bool:
        """Whether it was given such a part of what the one with most was, each for its weight, or more."""
        return self._for_weight(tenant) >= part * self._most()

    def some_had(self, times: float, all_weight: int) -> bool:
        """Whether one was given more than so many times its share, where the weights of all come to so much."""
        return self._most() * all_weight > times * self._all

    def rank(self) -> None:
        """Weights have changed, or too many entries are old."""
        self._ranks = [(-self._for_weight(name), name) for name in self._sums]
        heapify(self._ranks)

    def _most(self) -> float:
        while self._ranks:
            negative, name = self._ranks[0]
            if name in self._sums and negative == -self._for_weight(name):
                return -negative
            # Left from before: what the tenant has now has an entry of its own.
            heappop(self._ranks)
        return 0.0

    def _for_weight(self, tenant: str) -> float:
        return self._sums.get(tenant, 0.0) / self._weight(tenant)
