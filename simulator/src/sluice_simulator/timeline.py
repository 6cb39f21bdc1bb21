"""What a fleet of replicas did over time, in a bounded number of slices: batch, KV, queue, good requests.

Owns the slices: their width doubles when a run grows longer than they reach, so memory stays flat.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SLICES = 480


@dataclass(slots=True)
class Slice:
    """Sums over one slice of time; divided by time and replicas they are means."""

    busy_us: int = 0
    running_us: int = 0
    """Requests running × time."""
    waiting_us: int = 0
    """Requests waiting in the engines × time."""
    used_us: int = 0
    """KV blocks in use × time."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    door: int = 0
    """Most requests that waited at one gate's door."""
    arrived: int = 0
    refused: int = 0
    ended: int = 0
    good: int = 0
    preempted: int = 0

    def merged(self, other: Slice) -> Slice:
        """Both in one."""
        values = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        return Slice(**{**values, "door": max(self.door, other.door)})


class Timeline:
    """Slices of equal width."""

    def __init__(self, width_us: int) -> None:
        self.width_us = max(1, width_us)
        self.slices: list[Slice] = []

    def at(self, time_us: int) -> Slice:
        """The slice of a moment."""
        index = time_us // self.width_us
        while index >= MOST_SLICES:
            self._double()
            index = time_us // self.width_us
        while index >= len(self.slices):
            self.slices.append(Slice())
        return self.slices[index]

    def _double(self) -> None:
        pairs = [self.slices[i : i + 2] for i in range(0, len(self.slices), 2)]
        self.slices = [pair[0].merged(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
        self.width_us *= 2
