"""A high value of the last ones: what is estimated by it errs to the safe side nine times in ten.

Pure. Must not know what is measured.
"""

from __future__ import annotations

from collections import deque


class UpperQuantile:
    """The ninth of ten of the last values; a start until there are enough."""

    def __init__(self, start: float, *, window: int, least_samples: int) -> None:
        self._samples: deque[float] = deque(maxlen=window)
        self._least_samples = least_samples
        self.value = float(start)

    def learn(self, sample: float) -> None:
        """Take in one."""
        self._samples.append(sample)
        if len(self._samples) >= self._least_samples:
            ordered = sorted(self._samples)
            self.value = ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]
