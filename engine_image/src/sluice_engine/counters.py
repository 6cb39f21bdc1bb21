"""What the engine counts as it runs. Written by the engine's thread after each step; others read frozen copies.

It knows nothing of Prometheus: `metrics` turns a copy into series when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from sluice_engine.core.plan import Emission
from sluice_engine.core.request import Outcome

# Upper bounds in µs. Steps and gaps: from a small GPU step to a hung CPU one. Waits: from nothing to a minute and more.
STEP_BOUNDS_US = tuple(
    ms * 1000 for ms in (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2500, 5000, 10_000)
)
WAIT_BOUNDS_US = tuple(
    ms * 1000
    for ms in (1, 5, 10, 25, 50, 100, 250, 500, 750, 1000, 1500, 2000, 3000, 5000, 7500, 10_000, 20_000, 60_000)
)


@dataclass(frozen=True, slots=True)
class HistogramCopy:
    """A histogram as it stood: counts per bucket (the last one above all bounds), and the sum."""

    bounds_us: tuple[int, ...]
    counts: tuple[int, ...]
    sum_us: int


class Histogram:
    """Durations in buckets."""

    def __init__(self, bounds_us: tuple[int, ...]) -> None:
        self._bounds_us = bounds_us
        self._counts = [0] * (len(bounds_us) + 1)
        self._sum_us = 0

    def observe(self, duration_us: int) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds_us, duration_us)] += 1
        self._sum_us += duration_us

    def copy(self) -> HistogramCopy:
        """As it stands."""
        return HistogramCopy(self._bounds_us, tuple(self._counts), self._sum_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersCopy:
    """All counters as they stood after one step."""

    prompt_tokens: int
    output_tokens: int
    outcomes: dict[str, int]
    step: HistogramCopy
    ttft: HistogramCopy
    itl: HistogramCopy
    queue: HistogramCopy
    delivery_us: int


class Counters:
    """The totals of one engine since its start."""

    def __init__(self) -> None:
        self.delivery_us = 0
        """Time the engine's thread spent handing results over and publishing its state."""
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._outcomes = dict.fromkeys(map(str, Outcome), 0)
        self._step = Histogram(STEP_BOUNDS_US)
        self._ttft = Histogram(WAIT_BOUNDS_US)
        self._itl = Histogram(STEP_BOUNDS_US)
        self._queue = Histogram(WAIT_BOUNDS_US)
        self._last_token_us: dict[str, int] = {}

    def step_ran(self, real_us: int) -> None:
        """Count a step by its time on the device."""
        self._step.observe(real_us)

    def emitted(self, emissions: Iterable[Emission], now_us: int) -> None:
        """Count the tokens and ends of a step."""
        last_token_us = self._last_token_us
        for emission in emissions:
            request = emission.request
            if emission.token_id is not None:
                before = last_token_us.get(request.id)
                if before is None:
                    self._first_token(emission, now_us)
                else:
                    self._itl.observe(now_us - before)
                last_token_us[request.id] = now_us
                self._output_tokens += 1
            if emission.outcome is not None:
                last_token_us.pop(request.id, None)
                self._outcomes[emission.outcome] += 1

    def _first_token(self, emission: Emission, now_us: int) -> None:
        request = emission.request
        self._prompt_tokens += request.num_prompt
        self._ttft.observe(now_us - request.arrival_us)
        self._queue.observe(max(0, request.scheduled_us - request.arrival_us))

    def copy(self) -> CountersCopy:
        """As they stand."""
        return CountersCopy(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            outcomes=dict(self._outcomes),
            step=self._step.copy(),
            ttft=self._ttft.copy(),
            itl=self._itl.copy(),
            queue=self._queue.copy(),
            delivery_us=self.delivery_us,
        )
