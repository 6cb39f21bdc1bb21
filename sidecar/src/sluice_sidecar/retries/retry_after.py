"""When the refused are told to come back.

Owns the crowd of those who were told. The delay is drawn, so that they come back spread over the time it takes to let
them in. Pure: clock, draws and the measured waits come in with each call. Must not know what a request was refused for.
"""

from __future__ import annotations

from collections.abc import Callable

# Clients honour 1 to 30 s; beyond, they fall back to a pause of their own.
LEAST_US, MOST_WAIT_US, MOST_US = 1_000_000, 20_000_000, 30_000_000
LEAST_SPREAD_US = 1_000_000
# The crowd is kept by the quarter of a second in which it comes back.
SLOT_US = 250_000
# Who was refused earlier drew from a narrower span, so that single draws pile up at its beginning: of two hundred
# refused at once five times the mean come back in one second. Of sixteen draws the one that meets fewest keeps it at
# 1.4 to 1.6 times the mean on three seeds; of four at up to 2.3.
DRAWS = 16


class RetryAfter:
    """The crowd that was told to come back."""

    def __init__(self, draw: Callable[[int, int], int]) -> None:
        """`draw(lo, hi)` is a random whole number between both, evenly."""
        self._draw = draw
        self._slots: dict[int, int] = {}
        self._count = 0

    def crowd(self, now_us: int) -> int:
        """How many are still to come back."""
        for slot in [slot for slot in self._slots if (slot + 1) * SLOT_US <= now_us]:
            self._count -= self._slots.pop(slot)
        return self._count

    def delay_us(self, wait_us: int | None, time_for: Callable[[int], int | None], now_us: int) -> int | None:
        """When one more is told to come back; None while the drain is unmeasured.

        `wait_us` is the measured wait for the room it needs; `time_for(n)` the time in which n requests are let in.
        """
        if wait_us is None:
            return None
        lo = min(MOST_WAIT_US, max(LEAST_US, wait_us))
        crowd_us = time_for(self.crowd(now_us) + 1) or 0
        hi = min(MOST_US, lo + max(LEAST_SPREAD_US, crowd_us))
        delay_us = min((self._draw(lo, hi) for _ in range(DRAWS)), key=lambda drawn: self._meets(now_us + drawn))
        slot = (now_us + delay_us) // SLOT_US
        self._slots[slot] = self._slots.get(slot, 0) + 1
        self._count += 1
        return delay_us

    def _meets(self, at_us: int) -> int:
        """How many are to come back about then."""
        return self._slots.get(at_us // SLOT_US, 0)
