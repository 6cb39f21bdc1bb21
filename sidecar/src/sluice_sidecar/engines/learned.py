"""What another engine's steps cost, since it tells no step times: measured once at start, then learned from its gaps.

Owns the curve of step time over batch, and from it how many may run at once. The start is slow on purpose: twice the
largest batch whose gaps were seen, and no more, however the line through them looks. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.core.state import PrefillCost, StepCost
from sluice_engine.core.steptime import DEFAULT_TAIL_RATIO
from sluice_sidecar.engines.reading import Reading

# So many may run before any gap of a batch was seen: an engine that batches at all takes them.
FIRST_BATCH = 4
# A mean of fewer gaps says little.
LEAST_GAPS = 8
# What was seen of a batch is forgotten after this long: a storm that has passed keeps no door narrow.
KEPT_US = 60_000_000
# A queue beside the same number of running requests for this long is no queue of prefill: the engine is full.
FULL_AFTER_US = 1_000_000
# Weight of what was seen before against one window's mean.
_HISTORY = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Times of single requests at an idle engine, from its first answer to its last."""

    short_tokens: int
    short_us: int
    """Until the first token of a short prompt."""
    long_tokens: int
    long_us: int
    """The same for a longer one."""
    gap_us: int
    """Between two tokens of the only request."""

    @property
    def per_token_ns(self) -> int:
        """What a token of prefill adds to a step."""
        tokens, us = self.long_tokens - self.short_tokens, self.long_us - self.short_us
        if tokens <= 0 or us <= 0:
            tokens, us = self.long_tokens, self.long_us
        return max(1, us * 1000 // max(1, tokens))

    @property
    def fixed_us(self) -> int:
        """What a step costs beside its prefill."""
        return max(0, min(self.gap_us, self.short_us - self.short_tokens * self.per_token_ns // 1000))


@dataclass(slots=True)
class _Batch:
    requests: float
    gap_us: float
    seen_us: int


class LearnedSteps:
    """The step times of one engine."""

    def __init__(self, calibration: Calibration, inter_token_latency_us: int, most: int | None) -> None:
        """`most` is what the engine runs at once at most, where that is known."""
        self._calibration = calibration
        self._promise_us = inter_token_latency_us
        self._most = most
        self._batches: dict[int, _Batch] = {}
        """By the power of two that a batch reaches."""
        self._last: Reading | None = None
        self._queue: tuple[int, int] | None = None
        """(running, since when they have been that many beside a queue)."""
        self._full: tuple[int, int] | None = None
        """(running, when) the engine was last seen full."""

    def configure(self, inter_token_latency_us: int) -> None:
        """Another promise; what was learned of the engine stays."""
        self._promise_us = inter_token_latency_us

    def observe(self, reading: Reading, now_us: int) -> None:
        """Take in a page: what its gaps were since the last one, and beside how many."""
        self._notice_queue(reading, now_us)
        last = self._last
        if last is None or reading.restarted_since(last):
            self._last = reading
            return
        if None in {reading.gaps_total, last.gaps_total, reading.gap_seconds_total, last.gap_seconds_total}:
            self._last = reading
            return
        gaps = (reading.gaps_total or 0) - (last.gaps_total or 0)
        if gaps == 0:
            # Those that ended since were inside before: the busier of both pages stands for the window.
            self._last = last if (last.running or 0) > (reading.running or 0) else reading
            return
        if gaps < LEAST_GAPS:
            return
        self._last = reading
        seconds = (reading.gap_seconds_total or 0.0) - (last.gap_seconds_total or 0.0)
        requests = max(1.0, ((reading.running or 0) + (last.running or 0)) / 2)
        self._learn(requests, seconds * 1e6 / gaps, now_us)

    def _notice_queue(self, reading: Reading, now_us: int) -> None:
        """What an engine runs at most it may not tell, but shows: others wait beside them."""
        if self._full is not None and now_us - self._full[1] > KEPT_US:
            self._full = None
        running = reading.running or 0
        if not reading.waiting or not running:
            self._queue = None
        elif self._queue is None or self._queue[0] != running:
            self._queue = running, now_us
        elif now_us - self._queue[1] >= FULL_AFTER_US:
            self._full = running, now_us

    def _learn(self, requests: float, gap_us: float, now_us: int) -> None:
        self._batches = {k: v for k, v in self._batches.items() if now_us - v.seen_us <= KEPT_US}
        key = int(requests).bit_length()
        known = self._batches.get(key)
        if known is None:
            self._batches[key] = _Batch(requests, gap_us, now_us)
            return
        known.requests = (known.requests * _HISTORY + requests) / (_HISTORY + 1)
        known.gap_us = (known.gap_us * _HISTORY + gap_us) / (_HISTORY + 1)
        known.seen_us = now_us

    # What follows.

    @property
    def step_cost(self) -> StepCost:
        """The cost of a step with one decode."""
        fixed_us = self._calibration.fixed_us
        return StepCost(
            fixed_us=fixed_us,
            decode_us=max(1, self._calibration.gap_us - fixed_us),
            per_prefill_token_ns=self._calibration.per_token_ns,
        )

    @property
    def prefill_cost(self) -> PrefillCost:
        """What prefill adds; how much depth adds to that, a calibration does not tell."""
        return PrefillCost(per_token_ns=self._calibration.per_token_ns, per_prior_pair_ps=0)

    @property
    def curve_us(self) -> tuple[tuple[int, int], ...]:
        """(decode batch, µs of a step), rising."""
        points = {1: self._calibration.gap_us}
        for batch in self._batches.values():
            points[max(1, round(batch.requests))] = round(batch.gap_us)
        rising, highest = [], 0
        for requests, gap_us in sorted(points.items()):
            highest = max(highest, gap_us)
            rising.append((requests, highest))
        return tuple(rising)

    @property
    def max_sequences(self) -> int:
        """How many may run at once: inside the promise by the line through what was seen, and not much beyond it."""
        curve = [(requests, gap_us * DEFAULT_TAIL_RATIO) for requests, gap_us in self.curve_us]
        seen = curve[-1][0]
        most = max(FIRST_BATCH, 2 * seen)
        if self._most is not None:
            most = min(most, self._most)
        if self._full is not None:
            most = min(most, self._full[0])
        kept = [requests for requests, gap_us in curve if gap_us <= self._promise_us]
        if not kept:
            return 1
        largest = kept[-1]
        beyond = next(((requests, gap_us) for requests, gap_us in curve if requests > largest), None)
        at_us = dict(curve)[largest]
        if beyond is None:
            # The line through the first and the last point; through one, none.
            first_us = curve[0][1]
            slope = (at_us - first_us) / (largest - curve[0][0]) if largest > curve[0][0] else 0.0
        else:
            slope = (beyond[1] - at_us) / (beyond[0] - largest)
        fits = most if slope <= 0 else largest + int((self._promise_us - at_us) / slope)
        return max(1, min(most, fits))
