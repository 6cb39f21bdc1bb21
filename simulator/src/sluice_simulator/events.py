"""Virtual time: a heap of what is to happen, in integer microseconds. No thread, no asyncio, no real clock.

What falls on the same microsecond happens in the order in which it was asked for, so a run is reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

_LAST = 1 << 60


class Timer:
    """Something that is to happen; cancelling it costs nothing until its time comes."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It will not happen. The action is let go of at once, with all that it refers to."""
        self.action = None


class Events:
    """The loop."""

    def __init__(self) -> None:
        self.now_us = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = count()

    def at(self, time_us: int, action: Callable[[], None]) -> Timer:
        """Have something happen at a time that is not past."""
        assert time_us >= self.now_us, "nothing happens in the past"
        timer = Timer(action)
        heappush(self._heap, (time_us, next(self._order), timer))
        return timer

    def last_at(self, time_us: int, action: Callable[[], None]) -> Timer:
        """Have something happen after all else that falls on that time, whenever it is asked for."""
        timer = Timer(action)
        heappush(self._heap, (time_us, _LAST + next(self._order), timer))
        return timer

    def after(self, delay_us: int, action: Callable[[], None]) -> Timer:
        """Have something happen in a while."""
        return self.at(self.now_us + delay_us, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Let happen what is to happen, in order, until `until` says so or nothing is left."""
        heap = self._heap
        while heap and not until():
            time_us, _, timer = heappop(heap)
            action = timer.action
            if action is not None:
                self.now_us = time_us
                timer.action = None
                action()
