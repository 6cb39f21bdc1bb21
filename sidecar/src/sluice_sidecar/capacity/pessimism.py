"""How far predictions were off: a factor that is learned from actual over predicted, and is never below 1.

Owns sums that fade with time. Must not know what was predicted. Pure: the clock comes in with each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

# Beyond, something is broken that no prediction will mend.
MOST = 8.0
# Evidence halves in twice the time that is promised: what was predicted comes true within about that. Less than this
# would follow single requests.
LEAST_HALF_LIFE_US = 3_000_000
# What stands for "as predicted" beside the evidence, as a share of the promise: one late request is no proof.
PRIOR_SHARE = 0.125


class Pessimism:
    """What to multiply a prediction by.

    A sample weighs as much as its actual time is of the promise: thousands of short waits, in which a step's length is
    all the error, say nothing about the long ones that decide.
    """

    def __init__(self, promise_us: int, *, deviations: float = 0.0) -> None:
        """`deviations`: how far above the mean of what came of them predictions are to hold."""
        self._deviations = deviations
        self._actual_us = 0.0
        self._predicted_us = 0.0
        self._squares_us = 0.0
        """Of actual over predicted, each weighing as much as its prediction."""
        self._late_actual_us = 0.0
        self._late_predicted_us = 0.0
        self._faded_us = 0
        self.configure(promise_us)

    def configure(self, promise_us: int) -> None:
        """The time that is promised: the scale on which errors matter."""
        self._promise_us = max(1, promise_us)
        self._prior_us = self._promise_us * PRIOR_SHARE
        self._half_life_us = max(LEAST_HALF_LIFE_US, 2 * self._promise_us)

    def learn(self, predicted_us: int, actual_us: int, now_us: int) -> None:
        """Take in what a prediction turned out to be."""
        self._fade(now_us)
        weight = self._weight(actual_us)
        self._actual_us += weight * actual_us
        self._predicted_us += weight * predicted_us
        # Beyond what the factor can be, how far off it was says nothing more.
        self._squares_us += weight * actual_us * min(MOST, actual_us / max(1, predicted_us))

    def suspect(self, late: Iterable[tuple[int, int]]) -> None:
        """(predicted, waited so far) of those that are late already: counted until told anew, as if they came now."""
        self._late_actual_us = self._late_predicted_us = 0.0
        for predicted_us, waited_us in late:
            if waited_us > predicted_us:
                weight = self._weight(waited_us)
                self._late_actual_us += weight * waited_us
                self._late_predicted_us += weight * predicted_us

    def miss(self, now_us: int) -> None:
        """A prediction was wrong by nobody knows how much: as if half the promise had become all of it."""
        self.learn(self._promise_us // 2, self._promise_us, now_us)

    def factor(self, now_us: int) -> float:
        """Actual over predicted, so many deviations above its mean; 1 without evidence."""
        self._fade(now_us)
        actual_us = self._prior_us + self._actual_us + self._late_actual_us
        predicted_us = self._prior_us + self._predicted_us + self._late_predicted_us
        return min(MOST, max(1.0, actual_us / predicted_us + self._deviations * self._deviation()))

    def _deviation(self) -> float:
        """How far actual over predicted lies from its mean, as far as there is evidence."""
        if self._predicted_us <= 0:
            return 0.0
        mean = self._actual_us / self._predicted_us
        variance = max(0.0, self._squares_us / self._predicted_us - mean * mean)
        known = self._predicted_us / (self._prior_us + self._predicted_us)
        return known * sqrt(variance)

    def _weight(self, actual_us: int) -> float:
        return min(1.0, max(0.0, actual_us / self._promise_us))

    def _fade(self, now_us: int) -> None:
        elapsed_us = now_us - self._faded_us
        if elapsed_us <= 0:
            return
        left = 0.5 ** (elapsed_us / self._half_life_us)
        self._actual_us *= left
        self._predicted_us *= left
        self._squares_us *= left
        self._faded_us = now_us
