"""A step table that goes on learning from the steps that run.

What was measured at start was measured beside whatever else the machine did then. Each step that runs is one more
measurement, for nothing: its ratio to the prediction is booked on the cells that the prediction came from, and after a
batch of steps these cells move a part of the way. A cell that few steps rested on is taken to have moved as all have on
average, since a machine that is slower is slower everywhere; so a table that was measured beside a load comes back,
also where no step dares to go yet. The spread of the ratios becomes the table's tail: of steps that come near the
promise, since a few milliseconds of noise are much of a small step and nothing of one that could break it. The quantile
that short answers need is rarer than any step that is remembered: it is seen up to the promise's own percentile, and
drawn out from there as the body of the ratios spreads.

Owned by the engine's thread; knows no clock. Start reading at `RefinedTable.observe`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from sluice_engine.core.steptime import DEFAULT_TAIL_RATIO, Corner, StepTable, step_quantile

BATCH_STEPS = 64
# Part of the way that a cell moves towards what a whole batch says: some five batches to arrive.
GAIN = 0.5
# One step says no more than this: a page fault or a pause of the machine is not the cost of a step.
MOST_RATIO = 2.0
# Steps that a cell must rest on before it is believed as much as the average of all.
SURE_STEPS = 16.0
# What was seen counts for less with each batch, so that a machine may change.
KEPT_OF_WEIGHT = 0.98
# Steps from this share of the promise on teach the tail.
NEAR_PROMISE = 0.25
# So many at a time are held against their own median: of fewer, the median is as chance has it.
NEAR_STEPS = 16
# The tail is learned from at least so many of them, and forgets what is older than so many.
LEAST_TAIL_STEPS = 256
TAIL_STEPS = 2048
LEAST_TAIL_RATIO, MOST_TAIL_RATIO = 1.02, 3.0
# The body: as far as here steps say how they spread by themselves, and not what a hiccup of the machine adds.
BODY = (0.75, 0.9)
_NORMAL = statistics.NormalDist()


class RefinedTable:
    """Step times by a table that is replaced, batch by batch, by a better one."""

    def __init__(self, table: StepTable, target_percent: float, promise_us: int) -> None:
        """`promise_us`: between two tokens, of which `target_percent` of the gaps are to be within it."""
        self.table = table
        self.revision = 0
        """Raised with each new table: what was computed from an older one is out of date."""
        self.learned_steps_total = 0
        self._target_percent = target_percent
        self._near_us = NEAR_PROMISE * promise_us
        self._near: list[float] = []
        """Ratios of real to predicted, of steps that came near the promise."""
        self._spread: deque[float] = deque(maxlen=TAIL_STEPS)
        """The same, each over the median of its time: a table that is off as a whole has no longer tail for it."""
        self._cells = _Corrections(table.median_us)
        self._pairs = _Corrections(table.prior_pair_ps)

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Median cost of a step, as known by now."""
        return self.table.predict_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)

    def bound_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Cost at the promise's `step_quantile`, as known by now."""
        return self.table.bound_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)

    def aim(self, target_percent: float, promise_us: int) -> None:
        """Serve another promise: what was learned of step times stays, and their tail is that of its quantile."""
        self._target_percent = target_percent
        self._near_us = NEAR_PROMISE * promise_us
        self.table = replace(self.table, tail_ratio=self._tail_ratio())
        self.revision += 1

    def observe(
        self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int, real_us: int
    ) -> None:
        """Take in a step that ran; what it took beside the model is not part of `real_us`."""
        table = self.table
        predicted = table.predict_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)
        if predicted <= 0 or real_us <= 0 or table.extrapolates(decode_requests, prefill_tokens):
            return
        ratio = real_us / predicted
        if predicted >= self._near_us:
            self._near.append(ratio)
        said = math.log(min(MOST_RATIO, max(1 / MOST_RATIO, ratio)))
        of_pairs = 0.0
        if prior_pairs:
            of_pairs = 1 - table.predict_us(decode_requests, prefill_tokens, context_tokens) / predicted
            self._pairs.book(table.prefill_corners(prefill_tokens), of_pairs, said)
        self._cells.book(table.corners(decode_requests, prefill_tokens, context_tokens), 1 - of_pairs, said)
        self.learned_steps_total += 1
        if self.learned_steps_total % BATCH_STEPS == 0:
            self._learn()

    def _learn(self) -> None:
        """A new table from what the batch says."""
        if len(self._near) >= NEAR_STEPS:
            middle = statistics.median(self._near)
            self._spread.extend(ratio / middle for ratio in self._near)
            self._near.clear()
        medians = self._cells.learn()
        self.table = replace(
            self.table,
            median_us=medians,
            prior_pair_ps=self._pairs.learn(self._cells.average),
            tail_ratio=self._tail_ratio(),
        )
        self.revision += 1

    def _tail_ratio(self) -> float:
        """`step_quantile` of the target over the median; a thousandth is as near as anybody needs it."""
        if len(self._spread) < LEAST_TAIL_STEPS:
            return self.table.tail_ratio
        learned = min(MOST_TAIL_RATIO, max(LEAST_TAIL_RATIO, tail_of(self._spread, self._target_percent)))
        # A window of few steps has no tail to speak of: it is believed as it fills.
        trust = len(self._spread) / TAIL_STEPS
        return round(trust * learned + (1 - trust) * max(learned, DEFAULT_TAIL_RATIO), 3)


def tail_of(ratios: Iterable[float], target_percent: float) -> float:
    """The ratio that `step_quantile` of the steps stay below: seen up to the target, and drawn out beyond it.

    Beyond, the logarithm goes on as it spreads where that is least: in the body, or over all that is seen. So a pause
    of the machine once in thousands of steps is no step's cost, and what happens to more of them than may miss is.
    """
    ordered = sorted(ratios)

    def log_of(share: float) -> float:
        return math.log(ordered[math.ceil(share * len(ordered)) - 1])

    target = target_percent / 100
    spread = min(log_of(share) / _NORMAL.inv_cdf(share) for share in (*BODY, max(*BODY, target)))
    beyond = _NORMAL.inv_cdf(step_quantile(target_percent)) - _NORMAL.inv_cdf(target)
    return math.exp(log_of(target) + max(0.0, spread) * beyond)


class _Corrections:
    """Factors on measured values, as logarithms: each value's own where steps rested on it, else the average."""

    def __init__(self, measured: tuple[int, ...]) -> None:
        self.average = 0.0
        self._measured = measured
        self._own = [0.0] * len(measured)
        self._weights = [0.0] * len(measured)
        self._booked: dict[int, list[float]] = {}
        """Place → weight in this batch, and what its steps said, weighted."""

    def book(self, corners: Iterable[Corner], share: float, said: float) -> None:
        """A step said that what rests on these corners is off by a factor, as a logarithm."""
        for corner in corners:
            weight = corner.weight * share
            if weight > 0:
                book = self._booked.setdefault(corner.cell, [0.0, 0.0])
                book[0] += weight
                book[1] += weight * said

    def learn(self, average: float | None = None) -> tuple[int, ...]:
        """The values after a batch; `average` is that of others, where these are too few to have one."""
        believed = [self._believed(place) for place in range(len(self._own))]
        for place, (weight, said) in self._booked.items():
            # What the steps contradicted is what was believed when they were predicted.
            self._own[place] = believed[place] + GAIN * said / weight
            self._weights[place] += weight
        self._booked.clear()
        total = sum(self._weights)
        if average is not None:
            self.average = average
        elif total:
            self.average = sum(w * value for w, value in zip(self._weights, self._own, strict=True)) / total
        values = tuple(round(value * math.exp(self._believed(place))) for place, value in enumerate(self._measured))
        self._weights = [weight * KEPT_OF_WEIGHT for weight in self._weights]
        return values

    def _believed(self, place: int) -> float:
        weight = self._weights[place]
        return (weight * self._own[place] + SURE_STEPS * self.average) / (weight + SURE_STEPS)
