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
# So fast it meets the next storm with a crowd of young requests, which all grow together (docs/decisions/0014).
SLOW_RISE_PER_S = 0.1 / 60
MOST_RELAPSES = 4
# So much below the share that brought the storm, for each relapse, it rises fast: what was borne is borne again.
BELOW_STORM = 0.02
RELAPSE_US = 120_000_000
FORGET_US = 300_000_000
FALL = 0.9
FLOOR = 0.5
_MINUTE_US = 60_000_000


class Ceiling:
    """The share of the pool that the predicted peak may reach, steered by the engine's preemptions.

    A window of 5 s is bad when it had a preemption and the rate over 30 s is above the limit: × 0.9, not below 0.5.
    Where nobody was let in meanwhile, those inside are too many as it is, and a lower share would say no more of them.
    Clean for 10 s, with no bad window and no preemption that would make one: + 0.05 a second, up to the configured
    ceiling. Where that brought the next bad window within two minutes, it is so fast up to 2 % below the share that
    brought it, and beyond it + 0.1 a minute; 4 % and half of that where it did once more, and so on, until five minutes
    were clean.
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
        self._relapses = 0
        """How often in a row the rise brought the next storm."""
        self._fell_us: int | None = None
        """When the share last fell."""
        self._bore = 0.0
        """The share that is taken to be borne, where the rise brought a storm."""
        self._storm_us: int | None = None
        """When the last bad window ended, once clean time has passed since."""
        self._risen_us = 0

    def configure(self, kv_ceiling_percent: int, preemptions_per_minute: float) -> None:
        """Another top and another rate: what preemptions have taken away comes back at its usual pace."""
        top = kv_ceiling_percent / 100
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
            self._storm_us = self._fell_us = None
        if new:
            self._preempted.add(new, now_us)
            if self._fell_us is None or now_us - self._fell_us > SETTLED_AFTER_US:
                self._window_count += new
            if self._bad_until_us is not None and self.per_minute(now_us) > self._limit_per_minute:
                self._bad_until_us = now_us
        if now_us - self._window_from_us >= WINDOW_US:
            if self._window_count and self.per_minute(now_us) > self._limit_per_minute:
                self._fall(now_us)
            self._window_from_us, self._window_count, self._window_let_in = now_us, 0, False
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

    def _fall(self, now_us: int) -> None:
        """A window was bad."""
        if self._storm_us is not None:
            is_relapse = now_us - self._storm_us <= (FORGET_US if self._relapses else RELAPSE_US)
            self._relapses = min(MOST_RELAPSES, self._relapses + 1) if is_relapse else 0
            self._bore = self.share * (1 - BELOW_STORM * self._relapses)
        if self._window_let_in:
            self.share = max(FLOOR, self.share * FALL)
            self._fell_us = now_us
        self._storm_us, self._bad_until_us = None, now_us

    def _rise(self, now_us: int) -> None:
        if self._bad_until_us is None or self.share >= self._top:
            self._risen_us = now_us
            return
        clean_from_us = max(self._bad_until_us + CLEAN_AFTER_US, self._risen_us)
        if now_us > clean_from_us:
            self._storm_us = self._bad_until_us
            if now_us - self._bad_until_us > FORGET_US:
                self._relapses = 0
            rise_per_s, up_to = RISE_PER_S, self._top
            if self._relapses and self.share < self._bore:
                up_to = min(up_to, self._bore)
            elif self._relapses:
                rise_per_s = SLOW_RISE_PER_S / 2 ** (self._relapses - 1)
            self.share = min(up_to, self.share + rise_per_s * (now_us - clean_from_us) / 1_000_000)
            self._risen_us = now_us
