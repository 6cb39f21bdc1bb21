"""What the engine counts as it runs. Written by the engine's thread after each step; others read frozen copies.

It knows nothing of Prometheus: `metrics` turns a copy into series when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from sluice_engine.core.emissions import DecodedTokens, Emission, Emissions
from sluice_engine.core.plan import Ints
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

    def observe_all(self, durations_us: Ints) -> None:
        """Count many at once."""
        if len(durations_us):
            places = np.searchsorted(self._bounds_us, durations_us)
            for place, count in enumerate(np.bincount(places).tolist()):
                self._counts[place] += count
            self._sum_us += int(durations_us.sum())

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

    def step_ran(self, real_us: int) -> None:
        """Count a step by its time on the device."""
        self._step.observe(real_us)

    def emitted(self, emissions: Emissions, now_us: int) -> None:
        """Count the tokens and ends of a step."""
        for part in emissions.parts:
            if isinstance(part, DecodedTokens):
                self._decoded(part)
            else:
                for emission in part:
                    self._single(emission, now_us)

    def _decoded(self, tokens: DecodedTokens) -> None:
        """In bulk: nothing here is done for each token."""
        without = [index for index, emission in tokens.special.items() if emission.token_id is None]
        self._itl.observe_all(np.delete(tokens.gaps_us, without) if without else tokens.gaps_us)
        self._output_tokens += len(tokens) - len(without)
        for emission in tokens.special.values():
            if emission.outcome is not None:
                self._outcomes[emission.outcome] += 1

    def _single(self, emission: Emission, now_us: int) -> None:
        if emission.token_id is not None:
            self._output_tokens += 1
            if emission.gap_us is None:
                self._first_token(emission, now_us)
            else:
                self._itl.observe(emission.gap_us)
        if emission.outcome is not None:
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
