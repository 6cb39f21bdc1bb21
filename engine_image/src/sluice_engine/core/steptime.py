"""What a step costs, and how much prefill fits beside b decodes inside a promise.

A mixed step costs fixed + per prefill token × prefill tokens + decode(b), and more the deeper its chunks lie in their
prompts. Two sources answer the same questions: `PlanningProfile`, for examples and for `sluice check` before anything
was measured, and `StepTable`, which the engine fills on its own machine. Durations are integer microseconds.

A step is told by four numbers: how many requests decode, how many tokens of prefill there are, how many KV tokens the
decodes attend to (context), and how many *prior pairs* there are: query–key pairs of the step's prefill tokens with
tokens that were computed before the step, Σ chunk tokens × chunk start. (decision 2)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple, Protocol

# Planning price of computing a preempted request's state again: 0.06 ms per token. It is not the prefill price of a
# step (0.035 ms): it stands for the example of 4,000 tokens at 240 ms (docs/worked-example.md). Never mix the two.
PLANNING_RECOMPUTE_US_PER_TOKEN = 60

# Ratio of the quantile that a promise is held against (`step_quantile`) to the median, until it is learned.
DEFAULT_TAIL_RATIO = 1.15


def step_quantile(target_percent: float) -> float:
    """Share of steps that must end within the inter-token promise, for `target_percent` of the answers to keep it.

    An answer keeps it when so many of its own gaps do. One of 100 gaps may have a long one at 99 %; of one that is
    shorter no gap may be, and where every step is filled up to the promise each of its gaps has the same chance to be.
    The worst answer is the longest of these, with nearly 1 / (1 − q) gaps: a chance of (1 − q)² each makes 1 − q of it.
    (decision 19)
    """
    missed = 1 - target_percent / 100
    return 1 - missed * missed


class StepTimes(Protocol):
    """Answers of a step-time source."""

    @property
    def revision(self) -> int:
        """Raised whenever answers change: what was computed from older ones is out of date."""
        ...

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Median cost of a step."""
        ...

    def bound_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Cost at the promise's `step_quantile`, host overhead included: what a promise is held against."""
        ...


@dataclass(frozen=True, slots=True)
class PlanningProfile:
    """The planning constants: 20 ms, 0.035 ms per prefill token, 10 ms for the decode share.

    Source: the examples of docs/worked-example.md.
    """

    revision: ClassVar[int] = 0
    fixed_us: int = 20_000
    per_prefill_token_ns: int = 35_000
    decode_us: int = 10_000

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Cost of a step; context and depth do not matter here."""
        del context_tokens, prior_pairs
        share = self.decode_us if decode_requests else 0
        return self.fixed_us + -(-prefill_tokens * self.per_prefill_token_ns // 1000) + share

    def bound_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """The constants are taken as bounds."""
        return self.predict_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)


class Corner(NamedTuple):
    """A measured point that an interpolation rests on."""

    cell: int
    weight: float
    """Of all corners of one answer: 1 in sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Medians measured on a grid of decode batch × prefill tokens × context tokens, with linear interpolation.

    The grid's prefill is one chunk at the start of its prompt; what depth adds is a price per prior pair, measured at
    each prefill size. Attention's time is added to that of the matrix products, so the price is not a fourth axis.
    Axes rise strictly and start at 0. Beyond its last point an axis is extended along its last interval;
    `extrapolates` says so, and derived limits never rest on such a cell.
    """

    revision: ClassVar[int] = 0
    decode_axis: tuple[int, ...]
    prefill_axis: tuple[int, ...]
    context_axis: tuple[int, ...]
    median_us: tuple[int, ...]
    """Row-major: [decode][prefill][context]."""
    prior_pair_ps: tuple[int, ...] = ()
    """Picoseconds per prior pair at each point of the prefill axis; none: depth costs nothing."""
    tail_ratio: float = DEFAULT_TAIL_RATIO
    host_overhead_us: int = 0
    """Time of a step outside the model: planning, sampling's bookkeeping, delivery."""
    measured_on: str = ""
    """Machine, model and data type: a kept table is used again only where this agrees."""

    def __post_init__(self) -> None:
        """Check the shape."""
        size = len(self.decode_axis) * len(self.prefill_axis) * len(self.context_axis)
        if len(self.median_us) != size:
            raise ValueError(f"step table has {len(self.median_us)} cells, its axes make {size}")
        for axis in (self.decode_axis, self.prefill_axis, self.context_axis):
            if len(axis) < 2 or axis[0] != 0 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"step table axis {axis} must start at 0 and rise")
        if self.prior_pair_ps and len(self.prior_pair_ps) != len(self.prefill_axis):
            prices, sizes = len(self.prior_pair_ps), len(self.prefill_axis)
            raise ValueError(f"step table has {prices} prices of prior pairs for {sizes} prefill sizes")

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Median cost by trilinear interpolation, and what the prior pairs add."""
        d0, d1, dw = _locate(self.decode_axis, decode_requests)
        p0, p1, pw = _locate(self.prefill_axis, prefill_tokens)
        c0, c1, cw = _locate(self.context_axis, context_tokens)
        cells, num_p, num_c = self.median_us, len(self.prefill_axis), len(self.context_axis)

        def along_context(d: int, p: int) -> float:
            row = (d * num_p + p) * num_c
            low = cells[row + c0]
            return low + (cells[row + c1] - low) * cw

        def along_prefill(d: int) -> float:
            low = along_context(d, p0)
            return low + (along_context(d, p1) - low) * pw

        low = along_prefill(d0)
        cost = low + (along_prefill(d1) - low) * dw
        if prior_pairs and self.prior_pair_ps:
            prices = self.prior_pair_ps
            # Beyond the largest measured chunk its price stays: a line that falls would promise work for nothing.
            cost += prior_pairs * (prices[p0] + (prices[p1] - prices[p0]) * min(pw, 1.0)) / 1_000_000
        return max(0, round(cost))

    def bound_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        """Median × tail ratio + host overhead."""
        median = self.predict_us(decode_requests, prefill_tokens, context_tokens, prior_pairs)
        return round(median * self.tail_ratio) + self.host_overhead_us

    def corners(self, decode_requests: int, prefill_tokens: int, context_tokens: int) -> list[Corner]:
        """The cells, by their place in `median_us`, that an answer within the grid comes from."""
        d0, d1, dw = _locate(self.decode_axis, decode_requests)
        p0, p1, pw = _locate(self.prefill_axis, prefill_tokens)
        c0, c1, cw = _locate(self.context_axis, context_tokens)
        num_p, num_c = len(self.prefill_axis), len(self.context_axis)
        return [
            Corner((d * num_p + p) * num_c + c, d_weight * p_weight * c_weight)
            for d, d_weight in ((d0, 1 - dw), (d1, dw))
            for p, p_weight in ((p0, 1 - pw), (p1, pw))
            for c, c_weight in ((c0, 1 - cw), (c1, cw))
        ]

    def prefill_corners(self, prefill_tokens: int) -> list[Corner]:
        """The prices, by their place in `prior_pair_ps`, that a price comes from."""
        p0, p1, pw = _locate(self.prefill_axis, prefill_tokens)
        return [Corner(p0, 1 - min(pw, 1.0)), Corner(p1, min(pw, 1.0))] if self.prior_pair_ps else []

    def extrapolates(self, decode_requests: int, prefill_tokens: int) -> bool:
        """Whether an answer for this step leaves the measured grid."""
        return decode_requests > self.decode_axis[-1] or prefill_tokens > self.prefill_axis[-1]


def _locate(axis: Sequence[int], value: int) -> tuple[int, int, float]:
    """The interval of `axis` that `value` lies in (the last one beyond the end), and the weight of its upper end."""
    high = min(max(bisect_right(axis, value), 1), len(axis) - 1)
    low = high - 1
    return low, high, (value - axis[low]) / (axis[high] - axis[low])


class ChunkCeiling:
    """c(b): the largest prefill sum whose step, beside b decodes, stays within the inter-token promise."""

    # Contexts and depths are rounded up to this many tokens, so that a step asks a question that was asked before.
    GRAIN_TOKENS = 512
    MAX_KEPT = 1 << 16

    def __init__(self, times: StepTimes, promise_us: int, *, search_up_to_tokens: int = 1 << 20) -> None:
        self.times = times
        self.promise_us = promise_us
        self._search_up_to = search_up_to_tokens
        self._kept: dict[tuple[int, int, int], int] = {}
        self._revision = times.revision

    def __call__(self, decode_requests: int, context_tokens: int = 0, start_tokens: int = 0) -> int:
        """Tokens of one chunk that starts so deep in its prompt; 0 when even the decodes alone are over the promise."""
        context, start = (-(-tokens // self.GRAIN_TOKENS) for tokens in (context_tokens, start_tokens))
        key = (decode_requests, context, start)
        if self._revision != self.times.revision or len(self._kept) >= self.MAX_KEPT:
            self._kept.clear()
            self._revision = self.times.revision
        ceiling = self._kept.get(key)
        if ceiling is None:
            ceiling = self._search(decode_requests, context * self.GRAIN_TOKENS, start * self.GRAIN_TOKENS, 0, 0)
            self._kept[key] = ceiling
        return ceiling

    def beside(
        self, decode_requests: int, context_tokens: int, start_tokens: int, prefill_tokens: int, prior_pairs: int
    ) -> int:
        """Tokens of one more chunk that starts so deep, beside what the step prefills already."""
        if not prefill_tokens:
            return self(decode_requests, context_tokens, start_tokens)
        if not start_tokens and not prior_pairs:
            return max(0, self(decode_requests, context_tokens) - prefill_tokens)
        context_tokens = -(-context_tokens // self.GRAIN_TOKENS) * self.GRAIN_TOKENS
        return self._search(decode_requests, context_tokens, start_tokens, prefill_tokens, prior_pairs)

    def _search(
        self, decode_requests: int, context_tokens: int, start_tokens: int, prefill_tokens: int, prior_pairs: int
    ) -> int:
        def keeps(tokens: int) -> bool:
            pairs = prior_pairs + tokens * start_tokens
            bound_us = self.times.bound_us(decode_requests, prefill_tokens + tokens, context_tokens, pairs)
            return bound_us <= self.promise_us

        most = self._search_up_to - prefill_tokens
        if most < 1 or not keeps(1):
            return 0
        low, high = 1, 2  # doubling first: a noisy table need not be monotone, so the first failure bounds the search
        while high <= most and keeps(high):
            low, high = high, high * 2
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low
