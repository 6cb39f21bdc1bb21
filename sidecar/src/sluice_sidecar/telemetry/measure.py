"""What is measured at the door: first tokens, gaps, residence, and how far the predictions were off.

Small windows over integer microseconds; the clock comes in with each call. Must not know what is done with the numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sluice_engine.live_config import SLOConfig

T = TypeVar("T", int, float)

HORIZON_US = 300_000_000
_SLOTS = 30
_MINUTE_US = 60_000_000
# Bucket edges grow by 5 %: a quantile is read a little high, never by more.
_GROWTH = 1.05
_FIRST_US = 100
_EDGES: list[int] = [_FIRST_US]
while _EDGES[-1] < 600_000_000:
    _EDGES.append(max(_EDGES[-1] + 1, int(_EDGES[-1] * _GROWTH)))
_LAST = len(_EDGES) - 1


def percentile(values: Sequence[T], percent: float) -> T:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class QuantileWindow:
    """Quantiles of the last five minutes in bounded memory: one small histogram for each ten seconds."""

    def __init__(self, horizon_us: int = HORIZON_US) -> None:
        self._slot_us = horizon_us // _SLOTS
        self._slots: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, value_us: int, now_us: int) -> None:
        """Count one value."""
        slot = now_us // self._slot_us
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, {}))
            self._forget(slot)
        counts = self._slots[-1][1]
        # The first edge that is not below the value.
        bucket = min(bisect_left(_EDGES, value_us), _LAST)
        counts[bucket] = counts.get(bucket, 0) + 1

    def quantile(self, percent: float, now_us: int) -> int | None:
        """The value that `percent` of those counted do not exceed; None without any."""
        self._forget(now_us // self._slot_us)
        total: dict[int, int] = {}
        for _, counts in self._slots:
            for bucket, count in counts.items():
                total[bucket] = total.get(bucket, 0) + count
        number = sum(total.values())
        if not number:
            return None
        seen = 0
        for bucket in sorted(total):
            seen += total[bucket]
            if seen * 100 >= number * percent:
                return _EDGES[bucket]
        return _EDGES[max(total)]

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - _SLOTS:
            self._slots.popleft()


@dataclass(slots=True)
class StreamTimes:
    """One request's own times, from its whole body to its last chunk."""

    arrived_us: int
    prompt_tokens: int
    first_us: int | None = None
    """Of whichever choice came first."""
    last_us: dict[int, int] = field(default_factory=dict)
    """By choice: choices take turns in one stream, and the time between two of them is no gap."""
    gaps: int = 0
    gaps_over: int = 0
    longest_gap_us: int | None = None
    promise: str = ""
    """kept, ttft_missed or itl_missed, once it has completed."""
    output_tokens: int | None = None
    """As the engine counted them, once it has completed."""

    def token(self, now_us: int, gap_promise_us: int, choice: int = 0) -> int | None:
        """A chunk with text of a choice came: the gap before it, None for the choice's first."""
        if self.first_us is None:
            self.first_us = now_us
        last_us = self.last_us.get(choice)
        self.last_us[choice] = now_us
        if last_us is None:
            return None
        gap_us = now_us - last_us
        self.gaps += 1
        self.gaps_over += gap_us > gap_promise_us
        if self.longest_gap_us is None or gap_us > self.longest_gap_us:
            self.longest_gap_us = gap_us
        return gap_us

    def kept(self, slo: SLOConfig, now_us: int, output_tokens: int | None, *, streamed: bool) -> tuple[bool, bool]:
        """Whether the promise was kept for the first token, and for the gaps.

        A whole answer shows no single token: it is held to the time that the promise allows for all of them.
        """
        promise_us = slo.ttft_promise_us(self.prompt_tokens)
        if not streamed:
            allowed_us = promise_us + slo.inter_token_latency_us * max(0, (output_tokens or 1) - 1)
            return now_us - self.arrived_us <= allowed_us, True
        first_us = (now_us if self.first_us is None else self.first_us) - self.arrived_us
        return first_us <= promise_us, self.gaps_over * 100 <= self.gaps * (100 - slo.target_percent)


class GoodRequests:
    """How many requests of the last five minutes ended, and how many of them within the promise."""

    def __init__(self, horizon_us: int = HORIZON_US) -> None:
        self._horizon_us = horizon_us
        self._slots: deque[list[int]] = deque()
        """[slot of ten seconds, ended, good]"""
        self._started_us: int | None = None

    def add(self, *, good: bool, now_us: int) -> None:
        """Count one that ended."""
        slot = now_us * _SLOTS // self._horizon_us
        if self._started_us is None:
            self._started_us = now_us
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append([slot, 0, 0])
        self._slots[-1][1] += 1
        self._slots[-1][2] += good

    def totals(self, now_us: int) -> tuple[int, int]:
        """(ended, good)."""
        slot = now_us * _SLOTS // self._horizon_us
        while self._slots and self._slots[0][0] <= slot - _SLOTS:
            self._slots.popleft()
        return sum(item[1] for item in self._slots), sum(item[2] for item in self._slots)

    def good_per_minute(self, now_us: int) -> float:
        """Goodput, over the window or the time since the first request where that is shorter."""
        if self._started_us is None:
            return 0.0
        span_us = min(self._horizon_us, max(_MINUTE_US, now_us - self._started_us))
        return self.totals(now_us)[1] * _MINUTE_US / span_us


class Residence:
    """How long an admitted request stays: with the number inside, the rate at which room returns (Little's law)."""

    def __init__(self, weight: float = 0.2, least_samples: int = 3) -> None:
        self._weight = weight
        self._least_samples = least_samples
        self._samples = 0
        self._mean_us = 0.0

    def add(self, stayed_us: int) -> None:
        """Take in one that completed."""
        self._samples += 1
        # The first few count evenly, or the very first would weigh for long.
        weight = max(self._weight, 1 / self._samples)
        self._mean_us += weight * (stayed_us - self._mean_us)

    @property
    def mean_us(self) -> int | None:
        """The mean stay; None until it was measured a few times."""
        return int(self._mean_us) if self._samples >= self._least_samples else None


class RecentMost:
    """The largest number of the last minute, or a little longer: three slots of twenty seconds."""

    def __init__(self, slot_us: int = 20_000_000, slots: int = 3) -> None:
        self._slot_us = slot_us
        self._slots: deque[tuple[int, int]] = deque(maxlen=slots)

    def add(self, number: int, now_us: int) -> None:
        """Take in one number."""
        slot = now_us // self._slot_us
        if self._slots and self._slots[-1][0] == slot:
            number = max(number, self._slots.pop()[1])
        self._slots.append((slot, number))

    @property
    def most(self) -> int:
        """The largest; 0 before the first."""
        return max((number for _, number in self._slots), default=0)
