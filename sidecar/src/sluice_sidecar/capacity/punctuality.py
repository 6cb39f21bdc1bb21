"""The share of the promise that a predicted first token may take, steered by how many came late.

The second signal beside the learned bias, and no learning of times: a prediction may be wrong in a way that no factor
learns, and a first token that came late is a fact. Owns the outcomes of the last half minute. Must not know what was
predicted. Pure: the clock comes in with each call. Source: additive increase, multiplicative decrease, as for the
ceiling of KV blocks (docs/decisions/0018).
"""

from __future__ import annotations

from sluice_sidecar.capacity.recent import Recent

HORIZON_US = 30_000_000
# Fewer may be chance, whatever the share of them.
LEAST_LATE = 3
FALL, FLOOR = 0.8, 0.4
CLEAN_AFTER_US = 10_000_000
RISE_PER_S = 0.05
# Where the rise brought the next fall within two minutes, until five were clean.
SLOW_RISE_PER_S = 0.1 / 60
RELAPSE_US, FORGET_US = 120_000_000, 300_000_000


class Punctuality:
    """How much of the promise is given away."""

    def __init__(self, target_percent: float) -> None:
        self.share = 1.0
        self._told, self._late = Recent(HORIZON_US), Recent(HORIZON_US)
        self._fell_us: int | None = None
        """When the share last fell: who was let in before was let in by another one, and says nothing of this."""
        self._late_us = 0
        """When one was late that counts."""
        self._risen_us = 0
        self._rose = False
        """Since it last fell."""
        self._rises_slowly = False
        self.configure(target_percent)

    def configure(self, target_percent: float) -> None:
        """The share of the requests that the promise is given for, in percent."""
        self._allowed = 1 - target_percent / 100

    def told(self, admitted_us: int, now_us: int, *, late: bool) -> None:
        """Of one that was let in then, the first token came, or is due and has not."""
        if self._fell_us is not None and admitted_us <= self._fell_us:
            return
        self._told.add(1, now_us)
        if not late:
            return
        self._late.add(1, now_us)
        self._late_us = now_us
        num_late = self._late.total(now_us)
        if num_late >= LEAST_LATE and num_late > self._allowed * self._told.total(now_us):
            self._fall(now_us)

    def moved(self, now_us: int) -> None:
        """Time went by."""
        clean_from_us = max(self._late_us + CLEAN_AFTER_US, self._risen_us if self._rose else 0)
        if self._fell_us is None or self.share >= 1.0 or now_us <= clean_from_us:
            return
        self._rises_slowly &= now_us - self._fell_us <= FORGET_US
        rise_per_s = SLOW_RISE_PER_S if self._rises_slowly else RISE_PER_S
        self.share = min(1.0, self.share + rise_per_s * (now_us - clean_from_us) / 1_000_000)
        self._risen_us, self._rose = now_us, True

    def _fall(self, now_us: int) -> None:
        self.share = max(FLOOR, self.share * FALL)
        if self._rose and self._fell_us is not None:
            self._rises_slowly = now_us - self._fell_us <= (FORGET_US if self._rises_slowly else RELAPSE_US)
        self._fell_us, self._rose = now_us, False
        self._told.clear()
        self._late.clear()
