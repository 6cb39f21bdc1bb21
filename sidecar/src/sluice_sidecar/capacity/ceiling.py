"""The share of the pool that the predicted peak may reach, steered by what the engine makes of it.

Owns the windows and what the last storms told. Must not know requests or blocks. Pure: the clock comes in with each
call. Start reading at `Ceiling.observe` (docs/decisions/0014).
"""

from __future__ import annotations

from sluice_sidecar.capacity.recent import Recent

WINDOW_US = 5_000_000
RATE_HORIZON_US = 30_000_000
CLEAN_AFTER_US = 10_000_000
# What is preempted sooner after a fall belongs to the storm that the fall answered, wherever the windows part.
SETTLED_AFTER_US = 2_000_000
RISE_PER_S = 0.05
# What one preemption takes off the mark, and the most that those of one window take (docs/decisions/0014).
STEP = 0.003
MOST_PER_WINDOW = 0.03
# The mark rises so that it stands still where the engine preempts at this share of the limit.
AIM = 1 / 3
FORGET_US = 300_000_000
FALL = 0.9
FLOOR = 0.5
_MINUTE_US = 60_000_000


class Ceiling:
    """The share of the pool that the predicted peak may reach, steered by the engine's preemptions.

    A window of 5 s is bad when it had a preemption and the rate over 30 s is above the limit: × 0.9, not below 0.5.
    Where nobody was let in meanwhile, those inside are too many as it is, and a lower share would say no more of them.
    Clean for 10 s, with no bad window and no preemption that would make one: + 0.05 a second, up to the mark.

    The mark is the share that this load bears: the configured ceiling until a window was bad. From then on each
    preemption that comes while the share is at the mark lowers both by 0.003, at most by 0.03 in a window, and time
    raises them: they stand still where the engine preempts a third as often as it may. A window that lowered the mark
    falls as well only where one within the 10 s before was bad. A rise that ends in a bad window below the mark brings
    the mark down to there. Five minutes without any of it, and all is forgotten.

    Source: Robbins & Monro, A Stochastic Approximation Method, Ann. Math. Stat. 22, 1951.
    """

    def __init__(self, kv_ceiling_percent: int, preemptions_per_minute: float) -> None:
        self._top = self.share = kv_ceiling_percent / 100
        self._limit_per_minute = preemptions_per_minute
        self._counter: tuple[str, int] | None = None
        self._preempted = Recent(RATE_HORIZON_US)
        self._window_from_us: int | None = None
        self._window_count = 0
        self._window_let_in = False
        self._bad_until_us: int | None = None
        self._fell_us: int | None = None
        """When the share last fell."""
        self._mark = self._top
        """The share that this load bears, as far as is known: the share rises no higher."""
        self._known_us: int | None = None
        """When anything last told of it: a bad window, or a preemption that lowered it."""
        self._marked_us = 0
        """Until when it has risen."""
        self._window_took = 0.0
        """Off the mark."""
        self._has_risen = False
        """Whether the share has, since it last fell."""
        self._bad_us: int | None = None
        """When the last bad window ended."""
        self._risen_us = 0

    def configure(self, kv_ceiling_percent: int, preemptions_per_minute: float) -> None:
        """Another top and another rate: what preemptions have taken away comes back at its usual pace."""
        top = kv_ceiling_percent / 100
        self._mark = top if self._mark >= self._top else min(self._mark, top)
        self.share = top if self.share >= self._top else min(self.share, top)
        self._top, self._limit_per_minute = top, preemptions_per_minute

    def observe(self, boot_id: str, preemptions_total: int, now_us: int, *, let_in: bool = True) -> None:
        """Take in the engine's counter; a new boot_id is a reset, never a negative count.

        `let_in`: whether anybody was, since it was last told.
        """
        self._window_let_in |= let_in
        new = self._new(boot_id, preemptions_total)
        if self._window_from_us is None or now_us < self._window_from_us:
            # The first state, or a clock that went back.
            self._window_from_us, self._window_count = now_us, 0
            self._preempted.clear()
            self._risen_us = now_us
            self._bad_until_us = None if self._bad_until_us is None else min(self._bad_until_us, now_us)
            self._known_us = None if self._known_us is None else min(self._known_us, now_us)
            self._fell_us = self._bad_us = None
            self._window_took = 0.0
        self._raise_mark(now_us)
        if new:
            self._lower_mark(new, now_us)
            self._preempted.add(new, now_us)
            if self._fell_us is None or now_us - self._fell_us > SETTLED_AFTER_US:
                self._window_count += new
            if self._bad_until_us is not None and self.per_minute(now_us) > self._limit_per_minute:
                self._bad_until_us = now_us
        if now_us - self._window_from_us >= WINDOW_US:
            if self._window_count and self.per_minute(now_us) > self._limit_per_minute:
                self._fall(now_us)
            self._window_from_us, self._window_count, self._window_let_in = now_us, 0, False
            self._window_took = 0.0
        self._rise(now_us)

    def per_minute(self, now_us: int) -> float:
        """Preemptions a minute, over the last 30 s."""
        return self._preempted.total(now_us) * _MINUTE_US / RATE_HORIZON_US

    def _new(self, boot_id: str, preemptions_total: int) -> int:
        """Preemptions since the counter was last told."""
        counter, self._counter = self._counter, (boot_id, preemptions_total)
        if counter is None:
            return 0
        return preemptions_total if counter[0] != boot_id else max(0, preemptions_total - counter[1])

    def _raise_mark(self, now_us: int) -> None:
        elapsed_us, self._marked_us = max(0, now_us - self._marked_us), now_us
        if self._known_us is None:
            return
        if now_us - self._known_us > FORGET_US:
            self._known_us, self._mark = None, self._top
            return
        is_at_mark = self.share >= self._mark
        self._mark = min(self._top, self._mark + STEP * AIM * self._limit_per_minute * elapsed_us / _MINUTE_US)
        if is_at_mark:
            self.share = self._mark

    def _lower_mark(self, preempted: int, now_us: int) -> None:
        """What is preempted at the mark, by a load that has stormed of late, says that the mark is too high."""
        if self._known_us is not None and self._window_let_in and self.share >= self._mark:
            take = min(STEP * preempted, MOST_PER_WINDOW - self._window_took)
            self._window_took += take
            self.share = self._mark = max(FLOOR, self._mark - take)
            self._known_us = now_us

    def _fall(self, now_us: int) -> None:
        """A window was bad."""
        goes_on = self._bad_us is not None and now_us - self._bad_us <= CLEAN_AFTER_US
        if self._has_risen and not goes_on:
            self._mark = min(self._mark, self.share)
        if self._window_let_in and (goes_on or not self._window_took):
            self._has_risen = False
            self.share = max(FLOOR, self.share * FALL)
            self._fell_us = now_us
        self._bad_us = self._bad_until_us = self._known_us = now_us

    def _rise(self, now_us: int) -> None:
        if self._bad_until_us is None or self.share >= self._mark:
            self._risen_us = now_us
            return
        clean_from_us = max(self._bad_until_us + CLEAN_AFTER_US, self._risen_us)
        if now_us > clean_from_us:
            self._has_risen = True
            self.share = min(self._mark, self.share + RISE_PER_S * (now_us - clean_from_us) / 1_000_000)
            self._risen_us = now_us
